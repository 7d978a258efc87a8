"""A complete drafter of your own: after a token, expect what followed its last occurrence."""

from __future__ import annotations

from foredraft import LLM, SamplingParams
from foredraft.types import Draft, FloatArray, Sequence, Verdict


class EchoDrafter:
    hidden_layers: tuple[int, ...] = ()  # target layers whose hidden states ``observe`` receives

    def open(self, seq: Sequence) -> None: ...

    def propose(self, seqs: list[Sequence], num_tokens: list[int]) -> list[Draft]:
        return [self.draft(seq.tokens, num) for seq, num in zip(seqs, num_tokens, strict=True)]

    def draft(self, tokens: list[int], num: int) -> Draft:
        for index in range(len(tokens) - 2, -1, -1):
            if tokens[index] == tokens[-1]:
                return Draft(tuple(tokens[index + 1 : index + 1 + num]))
        return Draft()

    def observe(self, seq: Sequence, verdict: Verdict, hidden: FloatArray | None) -> None: ...

    def close(self, seq: Sequence) -> None: ...


if __name__ == "__main__":
    llm = LLM("smollm2-135m", speculative_config={"method": "echo"}, drafters={"echo": lambda config, context: EchoDrafter()})
    prompt = "red, green, blue, yellow, red, green, blue, yellow, red, green,"
    out = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=64))[0]
    print(out.outputs[0].text)
    print(f"acceptance length {out.metrics.speculation.acceptance_length:.2f}")
