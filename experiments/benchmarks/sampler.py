"""The sampler against transformers' and google-tunix's, continuous against static batches, and its share of the roofline.

All times are of whole calls, prefill and records included; ours record log-probs and the top-K view, the others nothing.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from benchmarks import subjects, timing
from flax import nnx

from jaxrl_llm import tasks
from jaxrl_llm.experience.prompts import tokenize
from jaxrl_llm.hub import pretrained
from jaxrl_llm.models.abstract import abstract
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.layers import matmul_transposed
from jaxrl_llm.rollout.choice import Choice
from jaxrl_llm.rollout.sampler import Sampler
from jaxrl_llm.rollout.slots import SamplingConfig

TOP_PS = (1.0, 0.95)
QUEUE = 4  # batches' worth of sequences that wait in the comparison of batching

_MODELS = flags.DEFINE_list("models", ["qwen3", "smollm2"], "qwen3 (4 layers, 256 wide, random), smollm2 (135M).")
_ROWS = flags.DEFINE_integer("rows", 32, "Sequences at once.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt_length", 32, "Tokens of each prompt.", lower_bound=1)
_NEW = flags.DEFINE_integer("new_tokens", 128, "Tokens of each completion.", lower_bound=1)
_LONGEST = flags.DEFINE_integer("longest", 256, "Limit of the skewed lengths.", lower_bound=16)
_TUNIX = flags.DEFINE_string("tunix_python", None, "Interpreter of an environment that has google-tunix.")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with prompts of equal length."""

    name: str
    model: ModelConfig
    graphdef: nnx.GraphDef
    params: Any
    prompts: list[list[int]]

    def sample(self, top_p: float, new_tokens: int, top_k: int, **options: Any) -> Callable[..., Any]:
        """Our sampler, waiting for `prompts, key`; nothing stops a response but its length."""
        choice = Choice(top_p=top_p)
        sampling = SamplingConfig(new_tokens, (), choice=choice, capture_top_k=top_k, **options)
        return functools.partial(Sampler(self.graphdef, self.model, sampling), self.params)


def subject(name: str, count: int, length: int) -> Subject:
    """The model `name` with `count` prompts of `length` tokens: at random, or the ends of chats for a trained one."""
    if name not in subjects.NAMES:
        raise ValueError(f"--models has {name!r}; choose from: {', '.join(subjects.NAMES)}")
    model, params = subjects.create(name)
    if name == "qwen3":
        prompts = np.random.default_rng(0).integers(0, model.vocab_size, (count, length)).tolist()
    else:
        chats = tasks.create({"name": "word_problems"}).train[:count]
        prompts = [ids[-length:] for ids in tokenize(chats, pretrained.tokenizer(subjects.checkpoint()), 2**30).tokens]
    shortest = min(map(len, prompts))
    if shortest < length:
        raise ValueError(f"--prompt_length is {length}; it must be at most {shortest} with {name}")
    return Subject(name, model, abstract(Decoder, model)[0], params, prompts)


def measure(repetitions: int, top_k: int) -> None:
    """Everything, one model after the other; `top_k` is the width of the view that ours record."""
    rows, length, new = _ROWS.value, _PROMPT.value, _NEW.value
    peak, bandwidth = ceilings(repetitions)
    side = subjects.SIDE
    print(
        f"machine: {peak / 1e9:.0f} GFLOP/s ({side} x {side} matrices, float32), {bandwidth / 1e9:.1f} GB/s (read + write)"
    )
    for name in _MODELS.value:
        it = subject(name, rows * QUEUE, length)
        print(f"\n{name}: {rows} rows, {length} + {new} tokens, K = {top_k}, {repetitions} repetitions")
        seconds = against_others(it, repetitions, top_k)
        roofline(it, seconds, repetitions, peak, bandwidth)
        if name == "qwen3":
            batching(it, repetitions, top_k)


def against_others(it: Subject, repetitions: int, top_k: int) -> float:
    """Prints tokens per second and ratios; our median seconds at temperature 1 without truncation."""
    rows, new = _ROWS.value, _NEW.value
    prompts, total = it.prompts[:rows], rows * new
    keys = iter(jax.random.split(jax.random.key(0), 10_000))
    found = {}
    with contextlib.ExitStack() as stack:
        generate = transformers_generate(it, prompts, new)
        calls = {}
        if _TUNIX.value is not None:
            directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / it.name
            subjects.save(directory, it.model, it.params)
            tunix = stack.enter_context(tunix_generate(_TUNIX.value, directory, prompts, new))
        for top_p in TOP_PS:
            sample = it.sample(top_p, new, top_k)
            calls["jaxrl_llm", top_p] = lambda sample=sample: sample(prompts, next(keys)).response_tokens
            calls["transformers", top_p] = lambda top_p=top_p: generate(top_p)
            if _TUNIX.value is not None:
                calls["tunix", top_p] = lambda top_p=top_p: tunix(top_p)
        found = dict(zip(calls, timing.take_turns(list(calls.values()), repetitions), strict=True))
    for top_p in TOP_PS:
        ours = found["jaxrl_llm", top_p]
        print(f"  T = 1, top_p = {top_p:g}")
        for (name, p), seconds in found.items():
            if p != top_p:
                continue
            middle, low, high = (total / s for s in timing.spread(seconds))
            line = f"{name:>16}: {middle:8.0f} tokens/s [{high:.0f}, {low:.0f}]"
            if name != "jaxrl_llm":
                ratios = timing.spread([theirs / own for theirs, own in zip(seconds, ours, strict=True)])
                line += "   ours is {:.2f} times as fast [{:.2f}, {:.2f}]".format(*ratios)
            print(line)
    return timing.spread(found["jaxrl_llm", 1.0])[0]


def transformers_generate(it: Subject, prompts: list[list[int]], new: int) -> Callable[[float], Any]:
    """transformers' `generate` on all cores, waiting for top_p."""
    import torch

    model = subjects.torch_model(it.model, it.params).eval()
    model.generation_config.eos_token_id = None  # nothing stops it but the length
    tokens = torch.tensor(prompts)

    def generate(top_p: float) -> Any:
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": top_p, "max_new_tokens": new}
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), pad_token_id=0, **options)
        assert out.shape == (len(prompts), len(prompts[0]) + new), out.shape
        return out.numpy()

    return generate


@contextlib.contextmanager
def tunix_generate(python: str, directory: pathlib.Path, prompts: list[list[int]], new: int) -> Iterator[Callable]:
    """tunix's sampler in a process of its own, waiting for top_p."""
    worker = pathlib.Path(__file__).with_name("tunix_worker.py")
    command = [python, str(worker), str(directory), str(new)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes) as process:
        seeds = iter(range(10_000))

        def answer() -> str:
            line = process.stdout.readline().strip()
            if not line:
                raise ValueError(f"--tunix_python: {python} {worker.name} ended; run it by hand to see why")
            return line

        def generate(top_p: float) -> None:
            call = {"prompts": prompts, "top_p": top_p, "seed": next(seeds)}
            print(json.dumps(call), file=process.stdin, flush=True)
            drawn = int(answer())
            assert drawn == len(prompts) * new, drawn

        answer()
        yield generate
        process.stdin.close()


def batching(it: Subject, repetitions: int, top_k: int) -> None:
    """Prints how much faster a queue of skewed lengths is done where finished rows are refilled."""
    rows, longest = _ROWS.value, _LONGEST.value
    lengths = skewed_lengths(rows * QUEUE, longest)
    continuous, static = it.sample(1.0, longest, top_k, slots=rows), it.sample(1.0, longest, top_k)
    usage = {}

    def refilled():
        report = lambda _, now: usage.update(steps=now.row_steps)  # noqa: E731
        return continuous(it.prompts, jax.random.key(0), limits=lengths, report=report).response_tokens

    def one_by_one():
        # A static batch goes on with all its rows until the longest is done.
        for start in range(0, len(lengths), rows):
            part = slice(start, start + rows)
            static(it.prompts[part], jax.random.key(0), limits=np.full(len(lengths[part]), lengths[part].max()))

    refill, batches = timing.take_turns([refilled, one_by_one], repetitions)
    ratio = timing.spread([b / a for a, b in zip(refill, batches, strict=True)])
    total, at_limit = int(lengths.sum()), np.mean(lengths == longest)
    print(
        f"  skewed lengths: {len(lengths)} sequences over {rows} slots, median {np.median(lengths):.0f} tokens, "
        f"{100 * at_limit:.0f} % at the limit of {longest}"
    )
    for name, seconds in (("continuous", refill), ("static", batches)):
        middle, low, high = (total / s for s in timing.spread(seconds))
        print(f"{name:>16}: {middle:8.0f} tokens/s [{high:.0f}, {low:.0f}]")
    print("{:>16}: {:8.2f} [{:.2f}, {:.2f}]".format("ratio", *ratio))
    print(f"{'of use':>16}: {100 * total / usage['steps']:7.0f} % of the rows' steps in continuous batching")


def skewed_lengths(count: int, longest: int) -> np.ndarray:
    """int [count]: one in twenty at the limit, the others geometric with a mean of a sixteenth of it."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.geometric(16 / longest, count), longest)
    lengths[random.permutation(count)[: max(1, count // 20)]] = longest
    return lengths


def ceilings(repetitions: int) -> tuple[float, float]:
    """FLOP/s of a product of large matrices, and bytes per second of an array read and written."""
    product, work = subjects.large_product()
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    buffers = [jnp.ones(2**26)]  # 256 MB, written where it was read: no new memory to be mapped

    def rewrite():
        buffers[0] = jax.block_until_ready(double(buffers[0]))

    multiplied, rewritten = timing.take_turns([product, rewrite], max(5, repetitions))
    return work / min(multiplied), 2 * buffers[0].nbytes / min(rewritten)


def roofline(it: Subject, seconds: float, repetitions: int, peak: float, bandwidth: float) -> None:
    """Prints what a decoding step must take by the machine's ceilings, what its matrix products alone take, and what it took."""
    model, rows, new = it.model, _ROWS.value, _NEW.value
    kernels = [leaf for path, leaf in pretrained.flatten(it.params).items() if "kernel" in path]
    weights = sum(kernel.size for kernel in kernels) + model.vocab_size * model.hidden_size
    context = _PROMPT.value + new / 2  # on average over the steps
    heads, kv_heads = (n * model.head_dim * model.num_layers for n in (model.num_heads, model.num_kv_heads))
    work = 2 * rows * weights + 4 * rows * context * heads
    traffic = 4 * (weights + 2 * rows * context * kv_heads)
    ideal, bound = max((work / peak, "arithmetic"), (traffic / bandwidth, "memory"))

    # As decoding multiplies them; where the unembedding is a matrix of its own, it is as large.
    matrices = [layer.T for kernel in kernels for layer in kernel] + [it.params["embedding"][...]]
    inputs = [jnp.ones((rows, matrix.shape[1])) for matrix in matrices]
    products = jax.jit(
        lambda inputs, matrices: [matmul_transposed(x, w) for x, w in zip(inputs, matrices, strict=True)]
    )
    alone = timing.spread(timing.take_turns([lambda: products(inputs, matrices)], max(5, repetitions))[0])[0]
    step = seconds / new
    print(
        f"  a step: {work / 1e9:.2f} GFLOP, {traffic / 1e9:.3f} GB; {1e3 * step:.2f} ms, prefill and records included"
    )
    for name, time in ((f"ideal ({bound})", ideal), ("its products", alone)):
        print(
            f"{name:>16}: {1e3 * time:8.2f} ms ({work / time / 1e9:.0f} GFLOP/s); the sampler reaches {100 * time / step:.0f} %"
        )
