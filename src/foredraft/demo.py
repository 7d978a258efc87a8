"""``foredraft demo``: one request decoded plainly and then with drafts, and the proof that both are the same.

Owns: the demo's request and its report.  Does not know: how a model is loaded or fetched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from foredraft.terminal import OriginSplitter, Transcript, format_table, has_colour, legend
from foredraft.types import SamplingParams

if TYPE_CHECKING:
    from foredraft.llm import LLM

MAX_TOKENS = 120
PLAIN: Mapping[str, Any] = {"method": "none"}
SPECULATIVE: Mapping[str, Any] = {"method": "auto"}
# An edit repeats most of what it edits, which is where drafts copied from the prompt are right.
PROMPT = '''Rename the function area to rectangle_area:

```python
def area(width, height):
    """Return the area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return width * height

def perimeter(width, height):
    """Return the length of all sides."""
    if width < 0 or height < 0:
        raise ValueError("sides must not be negative")
    return 2 * (width + height)
```'''


def run(model: str, open_llm: Callable[..., LLM], out: TextIO | None = None) -> int:
    """Run the demo on ``out`` (default stdout); 0 when both runs gave the same token ids, else 1.

    ``open_llm(model, **options)`` makes the LLM.

    Raises:
        ForedraftError: the model cannot be loaded.
    """
    out = sys.stdout if out is None else out
    # With the prefix cache, the second run would not have to read the prompt.
    llm = open_llm(model, speculative_config=SPECULATIVE, enable_prefix_caching=False)
    print(f"{PROMPT}\n", file=out)
    print("--- plain decoding: one token per pass of the model", file=out, flush=True)
    plain = _answer(llm, PLAIN, out)
    print(f"\n--- speculative decoding: a pass verifies a draft as far as it pays\n{legend(has_colour(out))}", file=out, flush=True)
    speculative = _answer(llm, SPECULATIVE, out)
    print(f"\n{report({'plain': plain, 'speculative': speculative})}", file=out)
    difference = first_difference(plain.answers[0].token_ids, speculative.answers[0].token_ids)
    if difference is None:
        print(f"identical: yes, all {plain.num_tokens} token ids", file=out)
        return 0
    tokens = [_token_at(llm, run.answers[0].token_ids, difference) for run in (plain, speculative)]
    print(f"identical: NO, token {difference} is {tokens[0]} plainly and {tokens[1]} with drafts", file=out)
    return 1


def _answer(llm: LLM, speculative: Mapping[str, Any], out: TextIO) -> Transcript:
    tokenizer = llm.checkpoint.tokenizer
    prompt = llm.chat_prompt([{"role": "user", "content": PROMPT}]) if tokenizer.has_chat_template else tokenizer.encode(PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, speculative=speculative)
    transcript = Transcript(out, splitters=[OriginSplitter(tokenizer, prompt)])
    for output in llm.stream([prompt], params):
        transcript.add(output)
    transcript.close()
    return transcript


def report(runs: Mapping[str, Transcript]) -> str:
    """A table of runs by name, and how much faster the last is than the first."""
    rows = [["", "tokens", "tokens/s", "acceptance length", "target passes"]]
    for name, run in runs.items():
        stats = run.speculation
        speed, length = f"{run.tokens_per_second:.1f}", f"{stats.acceptance_length:.2f}"
        rows.append([name, str(run.num_tokens), speed, length, str(stats.target_passes)])
    first, *_, last = (run.tokens_per_second for run in runs.values())
    ratio = f"\n\nspeed: {last / first:.2f} times plain" if first > 0 else ""
    return format_table(rows) + ratio


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token id that differs or that only one of the two has; None when they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def _token_at(llm: LLM, token_ids: Sequence[int], index: int) -> str:
    if index >= len(token_ids):
        return "absent"
    token = token_ids[index]
    return f"{token} ({llm.checkpoint.tokenizer.decode([token], skip_special_tokens=False)!r})"
