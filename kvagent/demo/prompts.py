"""The prompts of `kvagent demo`: plain text to be continued, so that they suit any model.

Their lengths differ on purpose: less than a block of tokens, a few blocks, and a few hundred
tokens, with a last block that is not full.
"""

from __future__ import annotations

__all__ = ["demo_prompts"]

_ARTICLE = """\
A language model answers a request in two phases. In the first, called prefill, it reads the whole \
prompt at once. For every token and every layer it computes a key and a value, and keeps both, \
because each later token will look back at them. Together they are the KV cache. Prefill is heavy \
arithmetic: it keeps the processor busy and hardly waits for memory. In the second phase, called \
decode, the model writes its answer, one token at a time. Each step computes little, but it has to \
read all of the weights and all of the cache, so it waits for memory most of the time. When both \
phases share one machine they disturb each other. A long prompt that arrives in the middle of an \
answer makes the reader of that answer wait, and a batch of many answers leaves little room for \
the next prompt. So the two are put on different machines, each of a kind and number that suits \
its phase. The price is a journey: when the prompt has been read, its cache must be carried from \
the machine that computed it to the machine that will write the answer. For a long prompt that is \
a lot of data, and the reader is waiting. It must therefore move fast, straight from memory to \
memory, without a stop on the way. And it must arrive whole, because a cache with a single wrong \
block does not crash anything. It only makes the model say something else, in the same calm voice \
as before. In short, the two phases are called
"""

_PROMPTS = (
    "The capital of France is",
    _ARTICLE.rstrip(),
    "Here is a short list of things to bring on a walk in the mountains in autumn, when the days "
    "are short and the weather changes quickly:\n1.",
    "def fibonacci(n):\n    '''Returns the first n Fibonacci numbers as a list.'''\n",
    "Question: A train leaves at nine in the morning and travels for three hours and a half, with "
    "a stop of twenty minutes on the way. When does it arrive?\nAnswer: Let us think step by step.",
    "Once upon a time, in a lighthouse at the end of a long pier, there lived",
)


def demo_prompts(count: int) -> list[str]:
    """`count` prompts, all different."""
    rounds = -(-count // len(_PROMPTS))
    later = (f"Part {number}. {text}" for number in range(2, rounds + 1) for text in _PROMPTS)
    return [*_PROMPTS, *later][:count]
