"""What drafting is expected to bring, and how many draft rows are worth their time.

Owns: the arithmetic of speculation, as pure functions.  Does not know: where its estimates come from, or what a sequence is.

Words: ``survival[i]`` is the probability that the first i + 1 draft tokens are all accepted; it never rises with i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq


def survival(acceptance: Iterable[float]) -> list[float]:
    """From the probability of each draft token, given that those before it were accepted, to that of reaching so far."""
    alive, reached = 1.0, []
    for probability in acceptance:
        alive *= probability
        reached.append(alive)
    return reached


def tokens_per_pass(acceptance: Iterable[float]) -> float:
    """Expected emitted tokens of a pass, ``1 + sum_i prod_{j<=i} a_j`` (Leviathan et al., 2211.17192, equation 1, by position)."""
    return 1.0 + sum(survival(acceptance), 0.0)


def allot(survivals: Seq[Seq[float]], seconds: Seq[float], price: float, worth: float = 1.0) -> list[int]:
    """Draft rows for each of several sequences that share a pass, best in expectation for the long run.

    A row is worth its survival probability in tokens; it costs the time that it adds to the pass, valued at what that time
    would bring otherwise.  All slots (sequence, depth) are ranked by survival and the best number of them is taken; since
    survival falls with depth, they are the beginnings of drafts.

    Args:
        survivals: one falling list per sequence.
        seconds: ``seconds[k]`` is the pass with k draft rows in all; a list shorter than the slots limits how many are taken.
        price: tokens per second that time is worth.
        worth: of an accepted token, what remains after the time that it takes elsewhere (sampling, text), in tokens.

    Returns:
        How many rows each sequence gets.
    """
    slots = [(reached, -index) for index, reaches in enumerate(survivals) for reached in reaches]
    # Of equal slots the earlier sequence's come first; sorting is stable, so the order within one stays.
    slots.sort(reverse=True)
    best, best_gain, gain = 0, 0.0, 0.0
    for k in range(1, min(len(slots), len(seconds) - 1) + 1):
        gain += worth * slots[k - 1][0]
        net = gain - price * (seconds[k] - seconds[0])
        if net > best_gain:
            best, best_gain = k, net
    counts = [0] * len(survivals)
    for _, index in slots[:best]:
        counts[-index] += 1
    return counts


def paying(reached: Iterable[float], prices: Iterable[float], worth: float = 1.0) -> tuple[int, float]:
    """(tokens of a draft that pay, what they are expected to bring beyond their rows' ``prices``)."""
    best, best_net, net = 0, 0.0, 0.0
    for count, (alive, price) in enumerate(zip(reached, prices, strict=False), start=1):
        net += worth * alive - price
        if net > best_net:
            best, best_net = count, net
    return best, best_net


def room(prices: Seq[float], worth: float = 1.0) -> float:
    """What drafts bring where rows have these prices, over what they bring where rows are free; about.

    Of drafts whose first token is right with probabilities that are spread evenly, those above the price pay, by half of what is
    above it in the mean.
    """
    return max(0.05, worth - prices[0]) ** 2 if prices else 1.0


def best_depth(reached: Seq[float], draft_seconds: Callable[[int], float], prices: Seq[float], price: float) -> int:
    """How deep to draft: the depth with the highest expected gain over the cost of drafting so deep; 0 when none pays."""
    best, best_net, gain = 0, 0.0, 0.0
    for depth, (alive, row) in enumerate(zip(reached, prices, strict=False), start=1):
        gain += max(0.0, alive - row)
        net = gain - price * draft_seconds(depth)
        if net > best_net:
            best, best_net = depth, net
    return best


def share_of(reached: Seq[float], depth: int, prices: Seq[float]) -> float:
    """What the first ``depth`` tokens of a draft are expected to bring of what all of them would."""
    gains = [max(0.0, alive - row) for alive, row in zip(reached, prices, strict=False)]
    total = sum(gains, 0.0)
    return sum(gains[:depth], 0.0) / total if total > 0.0 else 1.0


def best_fixed(acceptance: Seq[float], step_seconds: Callable[[int], float]) -> tuple[int, float]:
    """The K from 0 to ``len(acceptance)`` with the most tokens per second, and its speed-up over K = 0.

    ``step_seconds(k)`` is a whole step with k draft tokens: drafting, pass and everything else.
    """
    plain = step_seconds(0)
    best, best_speedup, tokens = 0, 1.0, 1.0
    for k, alive in enumerate(survival(acceptance), start=1):
        tokens += alive
        speedup = tokens * plain / step_seconds(k)
        if speedup > best_speedup:
            best, best_speedup = k, speedup
    return best, best_speedup
