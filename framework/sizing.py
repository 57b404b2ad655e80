"""How large the KV pools are: what the settings ask for, and what there is room for beside weights and steps."""

from __future__ import annotations

from typing import NamedTuple

from . import machine
from .errors import ConfigError
from .plan import Delta, Plan, RequestData, Slice
from .settings import Settings, host_blocks, parse_memory
from .types import SamplingParams

PROBE = SamplingParams(temperature=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20)
"""Of the requests in `largest_step`: samplers sort for it, while log-probabilities are kept; and those of the prompt
take what they take."""


class Memory(NamedTuple):
    """Bytes of a device. whole: what a fraction is a fraction of. taken: of it, by weights, steps and others. share:
    the fraction for the pool and what is taken, unless the user gives one."""

    whole: int
    taken: int
    share: str

    @property
    def free(self) -> int:
        return self.whole - self.taken


def pool_blocks(settings: Settings, max_model_len: int, block_bytes: int, memory: Memory, spare: int = 0) -> int:
    """Blocks of the device's pool, besides `spare` ones. Raises `ConfigError`, with the numbers, where they do not
    fit."""
    block_size, free, asked = settings.block_size, memory.free, settings.kv_memory
    if settings.kv_blocks is not None:
        blocks, field = settings.kv_blocks, f"--kv-blocks {settings.kv_blocks}"
    else:
        amount, field = parse_memory(asked or memory.share), f"--kv-memory {asked or memory.share}"
        budget = int(amount * memory.whole) - memory.taken if isinstance(amount, float) else amount
        blocks = budget // block_bytes - spare
        if blocks < 1:
            beside = f" beside the {machine.size(memory.taken)} that weights and steps take" if memory.taken else ""
            raise ConfigError(
                f"{field}: {machine.size(max(0, budget))}{beside} do not hold one KV block of {block_size} tokens "
                f"({machine.size(block_bytes)}); give at least {(1 + spare) * block_bytes} bytes"
            )
        if asked is None:  # take no more than could ever be used
            longest = min(settings.max_model_len or max_model_len, max_model_len)
            blocks = min(blocks, settings.max_num_seqs * -(-longest // block_size))
    if (blocks + spare) * block_bytes > free:
        raise ConfigError(
            f"{field}: a KV pool of {machine.size(blocks * block_bytes)} ({blocks} blocks of "
            f"{machine.size(block_bytes)}) is more than the {machine.size(max(0, free))} free; give less"
        )
    return blocks


def swap_blocks(settings: Settings, blocks: int, block_bytes: int, free: int) -> int:
    """Size of the host tier, with `free` bytes of host memory. Raises `ConfigError`, with the numbers, where it does
    not fit."""
    space = settings.swap_space
    count = host_blocks(space, blocks, block_bytes)
    if space is None:  # nobody relies on it
        return min(count, max(0, free) // block_bytes)
    if count * block_bytes > free:
        raise ConfigError(
            f"--swap-space {space}: {machine.size(count * block_bytes)} are more than the {machine.size(free)} of "
            "host memory that are free; give less, or 0"
        )
    return count


def largest_step(settings: Settings, max_model_len: int, groups: int) -> Plan:
    """A step of as many tokens and sampled requests as the settings allow, all of whose blocks are block 0: what it
    computes is nonsense, and takes as much memory as a step can."""
    tokens = settings.max_num_batched_tokens
    rest = tokens - (requests := min(settings.max_num_seqs, tokens))
    longest, new, slices = min(settings.max_model_len or max_model_len, max_model_len), [], []
    for number in range(requests):
        count = 1 + (more := min(rest, longest - 1))
        rest -= more
        id, table = f"largest step, {number}", (0,) * -(-count // settings.block_size)
        new.append(RequestData(id, [0] * count, count, PROBE, number))
        slices.append(Slice(id, 0, count, tuple(Delta(group, 0, table) for group in range(groups)), True))
    return Plan(0, tuple(new), tuple(slices))
