"""Measures generation: one prompt, one or more continuations of fixed lengths, and what they cost."""

from collections.abc import Sequence
from dataclasses import asdict

from hotcold.engine.engine import Engine
from hotcold.engine.loading import LoadedModel
from hotcold.engine.request import Request
from hotcold.engine.sampler import SamplingParams
from hotcold.engine.statistics import Figures
from hotcold.kernels.backend import MAX_DECODE_ROWS
from hotcold.kernels.cpu import ReadProbe

#: Natural text, since which neurons fire depends on it; repeated up to the prompt's length.
_TEXT = (
    "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest. "
    "Every morning she carried water from the well and fed the hens, and in the evening she sat by the fire "
    "and listened to the wind in the trees. One day a stranger knocked at the door. He was tired and hungry, "
    "and his boots were full of holes. The grandmother gave him bread and milk, and he told them of the sea, "
    "of ships as tall as churches, and of an island where nobody was ever cold. "
)
_PROBE_S = 0.2

#: One round's figures by the names they have in reports; None for what could not be measured.
Round = dict[str, float | None]


def prompt_of(model: LoadedModel, length: int) -> list[int]:
    """``length`` tokens of text, begun as the model's file says."""
    more = model.tokenizer.encode(_TEXT, add_bos=False)
    return [*model.tokenizer.encode(_TEXT), *more * (length // len(more))][:length]


def lengths_to_end_together(parallel: int, n_prompt: int, n_generate: int, chunk: int) -> list[int]:
    """Tokens to generate of each sequence, ``n_generate`` or a few more.

    Prompts are read one after the other, so the first to be ready generates beside the others' prompts. With
    these lengths those that run together end together, and steps without prompt rows hold all of them."""
    ready = [-(-(i % MAX_DECODE_ROWS + 1) * n_prompt // chunk) for i in range(parallel)]
    last = [max(ready[i - i % MAX_DECODE_ROWS :][:MAX_DECODE_ROWS]) for i in range(parallel)]
    return [n_generate + end - start for start, end in zip(ready, last, strict=True)]


def measure(
    engine: Engine, prompt: Sequence[int], lengths: Sequence[int], probe: ReadProbe | None, *, seed: int
) -> Round:
    """One prompt and as many continuations as there are lengths, after a probe of the read bandwidth. The
    first token belongs to the prompt, so generation is measured on those after it."""
    bandwidth = probe.measure(_PROBE_S) if probe else None
    before = engine.session.counters.copy()
    requests = [
        Request(prompt, SamplingParams(seed=seed + i), max_tokens=length, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]
    engine.run(requests)
    figures = Figures.of(engine.session.counters.since(before), engine.session.footprint)
    round = asdict(figures)
    del round["active_share_by_layer"]
    per_sequence = None
    if figures.tok_s and figures.rows_per_step:
        per_sequence = figures.tok_s / figures.rows_per_step
    return round | {
        "tok_s_per_sequence": per_sequence,
        "ttft_s": requests[0].timings.ttft_s,
        "read_bandwidth_gb_s": bandwidth,
        "bandwidth_share": bandwidth and figures.gb_s and figures.gb_s / bandwidth,
    }
