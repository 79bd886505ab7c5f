"""The benchmark: `kvagent bench`, which is also `scripts/benchmark`, and `scripts/simulate`.

It measures what a transfer costs beside what the machine can do, and whether that is as fast as
it must be. Nothing in the product imports it. The simulation of many engines: `simulation`.
"""
