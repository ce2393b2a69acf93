"""The forward pass of a decoder-only Transformer (arXiv 1706.03762), recorded once and replayed per step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from hotcold.kernels.backend import (
    PAGE,
    Backend,
    Batch,
    BatchLimits,
    Buffer,
    Chosen,
    Floats,
    IndexedBy,
    Program,
    Rows,
)
from hotcold.model.config import Config
from hotcold.model.devices import Devices
from hotcold.model.ffn.experts import chosen_buffers
from hotcold.model.ffn.feed_forward import FeedForward, LayerFFNs
from hotcold.model.ffn.given_ffn import AnyFFN
from hotcold.model.kv_cache import SequenceState
from hotcold.model.layer import Block, parallel_groups
from hotcold.model.layer_inputs import input_buffers
from hotcold.model.mixers.device_buffers import DeviceBuffers, Mixer
from hotcold.model.mixers.mixer import MixerWeights
from hotcold.model.mixers.rope import Rope, chosen_factors, rope_table
from hotcold.model.streams import other_streams
from hotcold.model.weights import Weights

#: Stages of a step, in order, by their largest number of rows, or by :data:`PROMPTS`.
Programs: TypeAlias = dict[int, list[Program]]
#: Key of the stages of steps with only prompt rows, if prompts have FFNs of their own.
PROMPTS = 0
#: Cosines and sines.
Tables: TypeAlias = dict[Rope, tuple[Floats, Floats]]
#: Blocks of a layer on its backend, in parallel groups. FFNs and mixers have one calling convention.
Layer: TypeAlias = list[list[Block[Mixer]]]


class _Stream(DeviceBuffers):
    """A device's buffers with the residual stream ``x``, and the inputs and outputs of blocks."""

    def __init__(self, ops: Backend, config: Config, limits: BatchLimits, tables: Tables) -> None:
        super().__init__(ops, limits, tables)
        self.x = self.buffer("x", config.dim)
        #: one for each parallel block
        self.normed = [self.buffer(f"normed {i}", config.dim) for i in range(1 + config.family.parallel)]
        #: output of a block that is normalised or scaled before it is added to x
        self.branch = self.buffer("branch", config.dim) if config.branches else self.x
        self.others = other_streams(self, config.streams, config.dim)  # residual streams besides x
        self.last = ops.zeros((limits.logits, config.dim))


class Transformer:
    """A model that turns the rows of :attr:`batch` into :attr:`logits`, one step at a time.

    ``weights`` and ``state`` are in ``backend``, one or several. ``ffns`` has one FFN per layer. ``shared``,
    if given, has the FFNs of shared experts, which are otherwise computed whole. ``limits`` bound a step;
    positions go up to ``limits.pages_per_sequence * PAGE``. ``prompt_ffns``, if given, has other FFNs for
    prompt rows; a step then has either prompt rows or decode rows (:attr:`separates_prompts`).

    Before each :meth:`run` the caller fills ``batch`` in place; its slots and pages refer to ``state``. Row r
    of ``logits`` ``[limits.logits, V]``, float32, belongs to the step's row ``batch.logits_rows[r]``.
    :meth:`read_logits` reads them from the head's backend.

    Consecutive parts on one backend are a stage, with its own program; between two stages the residual stream
    is copied. ``watch``, if set, is called with a stage's backend and first layer before it, and with None
    after the last."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        backend: Backend | Devices,
        ffns: Sequence[AnyFFN],
        limits: BatchLimits,
        state: SequenceState,
        shared: Sequence[AnyFFN | None] = (),
        prompt_ffns: Sequence[AnyFFN] = (),
    ) -> None:
        if len(ffns) != config.layers:
            raise ValueError(f"{len(ffns)} FFNs for {config.layers} layers: one each is needed")
        devices = Devices.from_backend(backend, config.layers)
        length = limits.pages_per_sequence * PAGE
        tables = {
            rope: rope_table(rope, length, chosen_factors(rope, weights.rope_factors, length))
            for rope in config.ropes
        }
        # The first one has the embedding.
        self._sides = {ops: _Stream(ops, config, limits, tables) for ops in dict.fromkeys(devices.parts)}
        self.config = config
        self.batch = Batch(limits)
        self.head = devices.head  #: the backend of ``logits``
        self.logits: Buffer = devices.head.zeros((limits.logits, config.vocab), on_host=True)
        self.watch: Callable[[Backend | None, int], None] | None = None
        #: by layer: the experts that a step's rows chose; empty without experts
        self.chosen: list[Chosen] = []
        if config.experts:
            self.chosen = [
                chosen_buffers(ops, limits.tokens, config.chosen_of(i))
                for i, ops in enumerate(devices.layers)
            ]
        self._weights = weights
        self._prompt_ffns = prompt_ffns
        self._shared = shared or [None] * config.layers
        self._backends = devices.layers
        self._state = state
        self._stages = [(self._sides[devices.parts[parts.start]], parts) for parts in devices.stages]
        self._last = self._stages[-1][0]  # has the head
        self._programs = self.record(ffns)

    def record(self, ffns: Sequence[AnyFFN]) -> Programs:
        """Records programs for :meth:`run` with other FFNs of the same weights, on the same buffers. FFNs for
        prompt rows stay those of the constructor, if it has them."""
        limits, layers = self.batch.limits, self._layers(ffns)
        most = limits.decode if self.separates_prompts else limits.tokens
        smaller = {size for ops in self._sides for size in ops.program_rows if size < most}
        # The largest first: a backend whose programs share scratch then allocates it once.
        recorded: Programs = {}
        if self.separates_prompts:
            recorded[PROMPTS] = self._record(self._layers(self._prompt_ffns), limits.tokens)
        for size in sorted(smaller | {most}, reverse=True):
            recorded[size] = self._record(layers, size)
        return dict(sorted(recorded.items()))

    def _record(self, layers: Sequence[Layer], rows: int) -> list[Program]:
        return [
            device.ops.record(partial(self._forward, device, parts, layers), rows)
            for device, parts in self._stages
        ]

    @property
    def separates_prompts(self) -> bool:
        """True if no step may have both prompt rows and decode rows."""
        return bool(self._prompt_ffns)

    def record_parts(self, ffns: Sequence[AnyFFN], parts: Sequence[range]) -> list[Program]:
        """Records a program for each range of parts, for a model on one backend. Part 0 is the embedding,
        part i layer i - 1, the last the head. Steps run the programs in order."""
        layers = self._layers(ffns)
        return [self._last.ops.record(partial(self._forward, self._last, each, layers)) for each in parts]

    def record_normed(self, out: Buffer) -> Program:
        """Records a program that writes the head's input for each row of the last step to ``out`` ``[T, D]``,
        a buffer of the head's backend."""
        device, batch, norm = self._last, self.batch, self._weights.norm
        return device.ops.record(lambda: device.ops.norm(device.x, norm, batch, out))

    @property
    def spare_rows(self) -> Buffer:
        """A buffer of rows ``[T, D]`` of the head's backend that is unused between two steps."""
        return self._last.normed[0]

    @property
    def hidden(self) -> Buffer:
        """The buffer from which a draft block reads hidden rows ``[T, D]``."""
        assert self._weights.hidden is not None
        return self._weights.hidden.buffer(self._last)

    def _layers(self, ffns: Sequence[AnyFFN]) -> list[Layer]:
        return [self._layer(i, ffn) for i, ffn in enumerate(ffns)]

    def run(self, programs: Programs | None = None) -> None:
        """Computes one step from :attr:`batch` into the KV cache and :attr:`logits`, by ``programs`` of
        :meth:`record` or its own. ``ValueError``: more rows, decode rows or logits than the limits."""
        rows, limits = self.batch.n_tokens, self.batch.limits
        if rows > limits.tokens or self.batch.n_logits > limits.logits:
            raise ValueError(f"step of {rows} rows, {self.batch.n_logits} logits: the limits are {limits}")
        if self.batch.n_decode > min(rows, limits.decode):
            raise ValueError(f"{self.batch.n_decode} decode rows: {min(rows, limits.decode)} are the most")
        stages = self._stages_for(self._programs if programs is None else programs)
        previous: _Stream | None = None
        for program, (device, parts) in zip(stages, self._stages, strict=True):
            if previous is not None:
                device.ops.copy(previous.ops, previous.x, device.x, rows)
                for source, target in zip(previous.others, device.others, strict=True):
                    device.ops.copy(previous.ops, source, target, rows)
                self._copy_inputs(device, parts, rows)
            if self.watch:
                self.watch(device.ops, max(parts.start - 1, 0))
            program.run()
            previous = device
        if self.watch:
            self.watch(None, 0)

    def _stages_for(self, programs: Programs) -> list[Program]:
        """Returns the stages of the batch's step."""
        rows, decode = self.batch.n_tokens, self.batch.n_decode
        if self.separates_prompts and rows > decode:
            if decode:
                raise ValueError(f"{decode} decode rows and {rows - decode} prompt rows: one kind is allowed")
            return programs[PROMPTS]
        return next(stages for size, stages in programs.items() if rows <= size and size != PROMPTS)

    def _copy_inputs(self, device: _Stream, parts: range, rows: int) -> None:
        """Copies the inputs of a stage's layers from the first stage, which computed them, to its backend."""
        first, width = self._stages[0][0], self.config.layer_input
        if width and device is not first:
            sources, targets = (input_buffers(each, self.config.layers, width) for each in (first, device))
            for i in range(parts.start - 1, min(parts.stop - 1, self.config.layers)):
                device.ops.copy(first.ops, sources[i], targets[i], rows)

    def read_logits(self, start: int = 0, stop: int | None = None) -> Floats:
        """Reads rows of :attr:`logits`, ``[stop - start, V]``, valid until the next :meth:`run`."""
        return self.head.read(self.logits, start, stop)

    def read_hidden(self, start: int = 0, stop: int | None = None) -> Floats:
        """Reads rows of the head's input, normalised, ``[stop - start, D]``; see :meth:`read_logits`."""
        return self.head.read(self._last.last, start, stop)

    def _layer(self, index: int, ffn: AnyFFN) -> Layer:
        layer, device = self._weights.layers[index], self._sides[self._backends[index]]
        return parallel_groups(
            [
                Block(each.norm, self._part(each.part, device, index, ffn), each.post_norm, each.beside)
                for each in layer.blocks
            ]
        )

    def _part(self, weights: MixerWeights | FeedForward, device: _Stream, index: int, ffn: AnyFFN) -> Mixer:
        state = self._state.layers[index]
        if not isinstance(weights, FeedForward):
            return weights.mixer(device, state)
        chosen = self.chosen[index] if self.chosen else None
        return weights.mixer(device, state, LayerFFNs(ffn, device.x, self._shared[index], chosen))

    def _forward(self, device: _Stream, parts: range, layers: Sequence[Layer]) -> None:
        ops, batch, weights, x = device.ops, self.batch, self._weights, device.x
        if parts.start == 0:
            self._embed(device)
        for i in range(max(parts.start - 1, 0), min(parts.stop - 1, len(layers))):
            if router := weights.layers[i].early_router:
                router.choose(ops, x, batch, self.chosen[i])
            for group in layers[i]:
                self._add(device, group)
            if (scale := weights.layers[i].scale) != 1:
                ops.add(x, x, batch, keep=0, scale=scale)
        if parts.stop == len(layers) + 2:
            if weights.streams is not None:
                weights.streams.end(device, batch, x)
            ops.gather(x, batch, device.last)
            ops.norm(device.last, weights.norm, batch, device.last, Rows.LOGITS)
            ops.linear(device.last, [weights.head], batch, [self.logits], rows=Rows.LOGITS)
            if self.config.softcap:
                ops.softcap(self.logits, batch, self.config.softcap)

    def _embed(self, device: _Stream) -> None:
        ops, x = device.ops, device.x
        batch, weights, scale = self.batch, self._weights, self.config.scales.embedding
        ops.embed(weights.embedding, batch, x)
        if weights.embedding_norm is not None:
            ops.norm(x, weights.embedding_norm, batch, x)
        if scale != 1:
            ops.add(x, x, batch, keep=0, scale=scale)
        if weights.positions is not None:
            ops.embed(weights.positions, batch, x, by=IndexedBy.POSITIONS, accumulate=True)
        if weights.inputs is not None:
            weights.inputs.compute(device, batch, x)
        if weights.streams is not None:
            weights.streams.begin(device, batch, x)
        if weights.hidden is not None:
            weights.hidden.compute(device, batch, x)

    def _add(self, device: _Stream, blocks: Sequence[Block[Mixer]]) -> None:
        """Adds the outputs of parallel blocks to x."""
        ops, batch, x, scale = device.ops, self.batch, device.x, self.config.scales.residual
        reads: list[Buffer] = []
        for i, block in enumerate(blocks):
            if block.norm is None:
                reads.append(x)
            elif i and block.norm is blocks[i - 1].norm:
                reads.append(reads[-1])
            else:
                ops.norm(x, block.norm, batch, device.normed[i])
                reads.append(device.normed[i])
        for block, read in zip(blocks, reads, strict=True):
            if block.post_norm is None and scale == 1:
                block.part(read, batch, x, add=True)
                continue
            block.part(read, batch, device.branch, add=False)
            if block.post_norm is not None:
                ops.norm(device.branch, block.post_norm, batch, device.branch)
            ops.add(x, device.branch, batch, scale=scale)
