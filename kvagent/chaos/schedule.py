"""Which process is hit when, and how: decided by a seed before anything happens.

Faults come at random moments (a Poisson process), each at a random target that is not stopped at
that time; when all are, the fault is left out. What is stopped is continued after a fixed time,
also beyond the end of the drill. Nothing is sent here, and nothing depends on the clock.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import Annotated

import msgspec

from kvagent.errors import ConfigError

__all__ = ["Action", "Plan", "Strike", "schedule"]

MAX_FAULTS = 1_000_000


class Action(str, Enum):
    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CONTINUE = "SIGCONT"


class Strike(msgspec.Struct, frozen=True):
    """`at`: seconds from the start of the drill."""

    at: float
    target: str
    action: Action


Seconds = Annotated[float, msgspec.Meta(gt=0, le=10_000_000)]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a schedule. Durations are in seconds."""

    targets: tuple[str, ...]
    """Names; their order matters to the seed."""
    seconds: Seconds
    """No fault comes later."""
    every: Seconds
    """From one fault to the next, on average."""
    kill: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Share of the faults that are SIGKILL; the others are SIGSTOP."""
    stop_seconds: Seconds
    """From SIGSTOP to SIGCONT."""
    seed: int = 0


def schedule(plan: Plan) -> list[Strike]:
    """All that will happen, in order. Raises `ConfigError` without targets, or for a value out of
    range."""
    try:
        plan = msgspec.convert(msgspec.to_builtins(plan), Plan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"chaos: {error}") from error
    if not plan.targets:
        raise ConfigError("chaos: nothing to hit: name a process with --target NAME=SOCKET")
    if plan.seconds / plan.every > MAX_FAULTS:
        raise ConfigError(f"chaos: more than {MAX_FAULTS} faults: give a longer --every")
    rng = random.Random(plan.seed)
    strikes: list[Strike] = []
    stopped = dict.fromkeys(plan.targets, 0.0)
    now = 0.0
    while (now := now + rng.expovariate(1 / plan.every)) < plan.seconds:
        at = round(now, 3)
        # Drawn always, and in this order: what is left out changes nothing of what comes later.
        number, kills = rng.random(), rng.random() < plan.kill
        able = [target for target in plan.targets if stopped[target] <= at]
        if not able:
            continue
        target = able[int(number * len(able))]
        if kills:
            strikes.append(Strike(at, target, Action.KILL))
        else:
            stopped[target] = round(at + plan.stop_seconds, 3)
            strikes.append(Strike(at, target, Action.STOP))
            strikes.append(Strike(stopped[target], target, Action.CONTINUE))
    # A process that is continued at the moment of its next fault is continued first.
    first = Action.CONTINUE
    return sorted(strikes, key=lambda strike: (strike.at, strike.action is not first))
