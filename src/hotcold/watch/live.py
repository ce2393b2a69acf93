"""Reports the neurons that are active for a watched request, while it runs.

Steps without a watched request collect nothing and run unchanged programs. Steps with one run programs whose
FFNs also report the active neurons (:meth:`Session.watched`)."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from hotcold.kernels.gpu import GPUMemoryError
from hotcold.runtime.counters import Counters, DiskFigures, Figures, bytes_of_rows
from hotcold.runtime.session import Session, Watched
from hotcold.watch.expert_map import shown_map
from hotcold.watch.memory_use import MemoryUse, memory_use
from hotcold.watch.neuron_map import MapLayout

FRAME_S = 0.1  #: time between frames with cells
_RATES_S = 1.0  # time that rates are measured over
_MOST_BYTES = 128 << 10  # limit of a frame's cells; tokens beyond it have none


@dataclass(frozen=True)
class Rates(DiskFigures):
    """Rates of the last second, or since the first token if that is more recent; None: nothing to measure.
    Rates of the disk are the whole engine's."""

    tok_s: float | None  #: of this request
    gb_s: float | None  #: weights, keys and values that the whole engine reads, in 1e9 bytes a second
    gpu_share: float | None  #: the GPU's share of the bytes of weights read for this request's steps
    guessed: int = 0  #: draft tokens of this request so far
    accepted: int = 0  #: accepted draft tokens


@dataclass(frozen=True)
class Frame:
    """Figures of a watched request for the tokens of a piece. The first token comes from the prompt, which is
    computed densely: it has no cells."""

    tokens: int  #: tokens of the answer up to the end of the piece's text
    #: indices of the answer's tokens that have cells in this frame; the first token is 0
    of: tuple[int, ...] = ()
    #: base64: the active cells of each token in ``of``, in the form of :meth:`NeuronMap.cells`
    cells: str = ""
    #: for each token in ``of``: number of active hot and cold neurons, or experts
    fired: tuple[tuple[int, int], ...] = ()
    rates: Rates | None = None
    note: str = ""  #: in the first frame: why no token has cells, unless the model itself is the reason

    def plain(self) -> dict[str, Any]:
        """Returns the fields for an event of a stream, without empty ones."""
        return {name: value for name, value in asdict(self).items() if value or name == "tokens"}


@dataclass(frozen=True)
class Picture:
    """Constant facts for a client that shows the active neurons."""

    layout: MapLayout
    memory: tuple[MemoryUse, ...]
    sparsity: str  #: the mode in use
    threads: int | None
    gpu: str  #: name of the GPU or of its substitute; empty without one
    notes: tuple[str, ...]

    @classmethod
    def from_session(cls, session: Session) -> Self:
        model = session.model
        gpu = ", ".join(each.gpu.name for each in model.on_gpus)
        if model.gpus and not gpu:
            gpu = f"{model.gpus[0].name}, instead of a GPU"
        layout, notes = shown_map(model).layout, tuple(session.notes)
        return cls(layout, memory_use(session), session.sparsity, model.threads, gpu, notes)


class Live:
    """Follows all watched requests of a session. The first watched request creates it."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.map = shown_map(session.model)
        self.watched: Watched | None = None
        self.note = ""  #: why there are figures without cells
        layout = self.map.layout
        if layout.zeros or layout.unit != "neuron":
            try:
                self.watched = session.watched(strongest=layout.unit == "strongest")
            except GPUMemoryError as error:
                self.note = f"the active neurons cannot be shown, only figures: {error}"
        # Limit of tokens in a frame. Reading a GPU's masks of each layer is slow, so it happens less often.
        self.most = 1 if session.model.on_gpus else max(1, _MOST_BYTES // max(1, self.map.nbytes))

    def due(self, decode: Sequence[tuple["Watchable", int]]) -> Watched | None:
        """Returns the object that watches the next step; None if no watched request decodes in it."""
        due = any(each.viewer is not None and not each.viewer.is_full(self.most) for each, _ in decode)
        return self.watched if due else None

    def take(self, decode: Sequence[tuple["Watchable", int]]) -> None:
        """Records the active neurons of the watched decode rows of a step, before the rows' tokens are
        sampled. Each row has the index of its token in the answer."""
        assert self.watched is not None
        masks: list[npt.NDArray[np.uint64]] = []
        for row, (request, token) in enumerate(decode):
            if (viewer := request.viewer) is None or viewer.is_full(self.most):
                continue
            if token < len(request.output):  # a row of a prompt, or of a token that is already known
                continue
            masks = masks or self.watched.active_masks(len(decode))
            viewer.note(token, self.map.token_masks(masks, row))


class Watchable(Protocol):
    """The fields of a request that :class:`Live` reads."""

    viewer: "Viewer | None"
    output: list[int]


class Viewer:
    """Collects the data of one request's frames."""

    def __init__(self) -> None:
        self.live: Live | None = None  # set when the request is added to the engine
        #: index of a token -> masks, in the map's form
        self._masks: dict[int, npt.NDArray[Any]] = {}
        self._next = 0.0  # time of the next frame with cells
        self._moments: list[_Moment] = []  # within the last second

    def is_full(self, limit: int) -> bool:
        return len(self._masks) >= limit

    def note(self, token: int, masks: npt.NDArray[Any]) -> None:
        self._masks[token] = masks

    def forget(self, tokens: int) -> None:
        """Removes the masks after the first ``tokens`` of the answer: they were of rejected draft tokens."""
        self._masks = {token: masks for token, masks in self._masks.items() if token < tokens}

    def frame(self, tokens: int, *, last: bool) -> Frame:
        """Returns the frame of a piece. The piece ends after ``tokens`` tokens of the answer."""
        now = time.perf_counter()
        if self.live is None or (now < self._next and not last):
            return Frame(tokens)
        note = "" if self._next else self.live.note
        self._next = now + FRAME_S
        rates = self._rates(now, tokens)
        of = tuple(token for token in self._masks if token < tokens)
        if not of:
            return Frame(tokens, rates=rates, note=note)
        cells, counts = self.live.map.cells(np.array([self._masks.pop(token) for token in of]))
        return Frame(tokens, of, cells, tuple(counts), rates)

    def _rates(self, now: float, tokens: int) -> Rates | None:
        assert self.live is not None
        moments = self._moments
        moments.append(_Moment.from_live(self.live, now, tokens))
        while len(moments) > 2 and now - moments[1].time >= _RATES_S:
            moments.pop(0)
        return None if len(moments) == 1 else moments[-1].since(moments[0], self.live)


@dataclass(frozen=True)
class _Moment:
    """Counters at one time."""

    time: float
    tokens: int
    counters: Counters
    sides: npt.NDArray[np.int64]  # Watched.counts
    steps: int  # number of steps in ``sides``

    @classmethod
    def from_live(cls, live: Live, now: float, tokens: int) -> Self:
        session = live.session
        counters = session.counters.copy()
        if live.watched is None:
            sides = np.zeros((2, *counters.rows.shape), np.int64)
            return cls(now, tokens, counters, sides, counters.decode_steps)
        return cls(now, tokens, counters, live.watched.counts(), live.watched.steps)

    def since(self, before: Self, live: Live) -> Rates:
        seconds, session = self.time - before.time, live.session
        counters = self.counters.since(before.counters)
        figures = Figures.from_counters(counters, session.footprint)
        new = self.tokens - before.tokens
        tok_s = new / seconds if new > 0 and seconds > 0 else None
        gpu, cpu = _bytes_read(live, counters, self.sides - before.sides, self.steps - before.steps)
        return Rates(
            tok_s,
            figures.gb_s,
            gpu / (gpu + cpu) if gpu + cpu else None,
            **{each.name: getattr(figures, each.name) for each in fields(DiskFigures)},
        )


def _bytes_read(live: Live, counters: Counters, sides: npt.NDArray[np.int64], steps: int) -> tuple[int, int]:
    """Returns the bytes of weights that the GPU and the CPU read in ``steps``; ``counters`` may have more."""
    model, footprint = live.session.model, live.session.footprint
    by_layer = bytes_of_rows(sides, footprint.row_bytes).sum(2)  # [2, layers]
    if live.watched is None:
        experts = [model.config.experts_of(i) for i in range(model.config.layers)]
        shares = [each.chosen / each.count if each else 1 for each in experts]
        weights = zip(model.weights.layers, shares, strict=True)
        by_layer[0] = [steps * layer.ffn.nbytes * share for layer, share in weights]
        computed = bytes_of_rows(counters.rows, footprint.row_bytes).sum(1) * steps
        by_layer[0] += np.where(live.session.chosen_bytes, computed // max(1, counters.decode_steps), 0)
    read = [
        *zip(model.devices.layers, by_layer[0].tolist(), strict=True),
        (model.backend, int(by_layer[1].sum())),
    ]
    read += [(backend, steps * nbytes) for _, backend, nbytes in live.session.read_whole()]
    shared = bytes_of_rows(counters.shared, footprint.shared_row_bytes).sum(1) * steps
    of_steps = shared // max(1, counters.decode_steps)
    read += [*zip(model.devices.layers, of_steps.tolist(), strict=False)]
    cpu = sum(nbytes for backend, nbytes in read if backend is model.backend)
    return sum(nbytes for _, nbytes in read) - cpu, cpu
