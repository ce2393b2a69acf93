"""Trains a model until most of its neurons are zero: the recipe of TurboSparse and ProSparse.

The activation becomes dReLU (arXiv 2406.05955) or ReLU; training goes on, from the original if wished; an L1
penalty on the activations grows along sines, stage by stage (ProSparse, arXiv 2402.13516, section 3); at the
end the threshold of the gate rises as far as perplexity allows (FATReLU, the same). Options and files decide
about the weights: a run that is killed anywhere goes on from its last state and ends with the same ones."""

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.training.libraries import torch
from hotcold.training.mixture import Mixture, NamedText
from hotcold.training.run_state import RunState
from hotcold.training.sparse_checkpoint import (
    Original,
    load_model,
    open_original,
    stored_type,
    write_checkpoint,
)
from hotcold.training.sparse_ffn import KINDS, Kind, SparseActivation, decoder_layers, put_in
from hotcold.training.sparsity_picture import Curve, sparsity_picture

#: Ends of the stages, as shares of the tokens, and the share of the penalty that each reaches. In the first,
#: the model recovers from its new activation; in the last, it gets used to the full penalty.
STAGES = ((0.10, 0.0), (0.30, 0.1), (0.50, 0.4), (0.70, 1.0), (1.0, 1.0))
REPORTS = 10  #: reports of a run
MOST_LOSS = 1.001  #: how much larger a threshold may make the perplexity: PowerInfer's limit for predictors
_THRESHOLDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64)
_WARM, _LAST_RATE = 0.03, 0.1  # share of the steps in which the learning rate rises, and what is left of it
_CLIP = 1.0  # largest norm of a step's gradient
_NEWEST = 0.05  # weight of the newest loss in the running mean


@dataclass(frozen=True)
class SparsifyOptions:
    """Options of a run; all of them decide about its weights."""

    tokens: int  #: to train on
    activation: Kind = "drelu"
    learning_rate: float = 5e-5  #: the highest; TurboSparse's
    l1: float = 0.3  #: the highest penalty, in nats for the activations of the start
    context: int = 512  #: tokens of a window
    batch: int = 8  #: windows of a step
    distil: float = 0.0  #: share of the loss that is the divergence from the original's predictions
    special: bool = True  #: names of control tokens in texts become these tokens
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """How far a run is, and how good and how sparse the model is on text that is not trained on."""

    tokens: int
    loss: float  #: nats, a running mean over training text
    perplexity: float
    zeros: list[float]  #: share of activations that are zero, by layer

    @property
    def mean_zeros(self) -> float:
        return sum(self.zeros) / len(self.zeros)


@dataclass(frozen=True)
class Sparsified:
    """The result of a run."""

    original_perplexity: float
    reports: list[Report]
    thresholds: list[tuple[float, float, float]]  #: threshold, perplexity, share of zeros
    threshold: float
    perplexity: float  #: of the weights as they are written
    zeros: list[float]  #: by layer
    seconds: float = field(compare=False, default=0.0)  #: since the last start

    def report(self) -> dict[str, Any]:
        return asdict(self)


def sparsify(
    checkpoint: Path,
    texts: Sequence[NamedText],
    output: Path,
    options: SparsifyOptions,
    *,
    device: str | None = None,
    work: Path | None = None,
    told: Callable[[Report], None] = lambda report: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    save_seconds: float = 300,
) -> Sparsified:
    """Makes a checkpoint sparse; ``output`` is a checkpoint folder, which appears whole or not at all.

    ``work`` (``OUTPUT.work`` by default) holds the state of a run, saved every ``save_seconds``, so that the
    same call goes on where one was ended; a run that comes to its end deletes it. ``device`` None is a GPU,
    if there is one. UserError: a value is not allowed, a folder is no checkpoint of a known form, a text is
    too short, memory or disk do not suffice, the loss is not a number, or ``work`` is another run's."""
    start = time.monotonic()
    _check(options, output)
    original = open_original(checkpoint, options.activation)
    if options.context > original.context:
        raise UserError(f"a context of {options.context}: the model knows {original.context} positions")
    place = _device(device)
    tokenizer, seed = original.tokenizer, options.seed
    mixture = Mixture(texts, tokenizer, options.context, seed, special=options.special)
    state = RunState(work or output.with_name(output.name + ".work"), _identity(original, texts, options))
    try:
        run = _Run(original, mixture, options, place)
        run.check_room(state)
        run.restore(state)
        run.train(state, told, progress, save_seconds)
        found = run.finish(time.monotonic() - start)
        picture = {"sparsity.svg": _picture(original.folder.name, found)}
        write_checkpoint(output, original, run.model, run.activation, picture)
    except torch.OutOfMemoryError:
        raise UserError("out of memory: a smaller batch or a shorter context takes less") from None
    state.delete()
    return found


def penalty_share(progress: float) -> float:
    """The share of the L1 penalty at a share of the run; between stages it moves along half a sine."""
    begin, low = 0.0, 0.0
    for end, high in STAGES:
        if progress < end:
            return low + (high - low) * (1 - math.cos(math.pi * (progress - begin) / (end - begin))) / 2
        begin, low = end, high
    return low


def rate_share(progress: float) -> float:
    """The share of the learning rate: it rises linearly, and falls along a cosine."""
    if progress < _WARM:
        return progress / _WARM
    fallen = (1 + math.cos(math.pi * (progress - _WARM) / (1 - _WARM))) / 2
    return _LAST_RATE + (1 - _LAST_RATE) * fallen


class _Run:
    """A model in training."""

    def __init__(self, original: Original, mixture: Mixture, options: SparsifyOptions, device: Any) -> None:
        self._original, self._mixture, self._options, self._device = original, mixture, options, device
        self.steps = max(1, options.tokens // (options.batch * options.context))
        self.model = load_model(original, device)
        # A GPU lacks a few operations that repeat exactly: those warn.
        torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
        self._half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        self._teacher = load_model(original, device).eval().requires_grad_(False) if options.distil else None
        self.activation = SparseActivation(options.activation, len(decoder_layers(self.model)))
        self.step, self.loss = 0, math.nan
        self.reports: list[Report] = []
        self.original_perplexity = self._perplexity()
        put_in(self.model, self.activation)
        self._optimiser = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self._units = self._magnitudes()

    def check_room(self, state: RunState) -> None:
        """UserError: two states, each three numbers a weight, and the output do not fit on the disk."""
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        needed, free = weights * 4 * 7, shutil.disk_usage(state.folder.parent).free
        if needed > free and not state.folder.exists():
            place = f"{free} are free in {state.folder.parent}"
            raise UserError(f"a run needs {needed} bytes in all, and {place}: give another `work`")

    def restore(self, state: RunState) -> None:
        if (saved := state.load()) is None:
            return
        self.model.load_state_dict(saved["model"])
        self._optimiser.load_state_dict(saved["optimiser"])
        self.step, self.loss = saved["step"], saved["loss"]
        self.reports = [Report(**report) for report in saved["reports"]]

    def _saved(self) -> dict[str, Any]:
        for weights in self.model.parameters():  # the state on disk must be one from which a run can go on
            self._check_finite("a weight", weights.detach().abs().max())
        return {
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "loss": self.loss,
            "reports": [asdict(report) for report in self.reports],
        }

    def train(
        self,
        state: RunState,
        told: Callable[[Report], None],
        progress: Callable[[int, int], None],
        save_seconds: float,
    ) -> None:
        per_step, saved_at = self._options.batch * self._options.context, time.monotonic()
        for report in self.reports:
            told(report)
        while self.step < self.steps:
            self._train_step()
            self.step += 1
            progress(self.step * per_step, self.steps * per_step)
            if self.step == self.steps or self.step * REPORTS // self.steps > len(self.reports):
                perplexity, zeros = self._measure()
                self.reports.append(Report(self.step * per_step, self.loss, perplexity, zeros))
                told(self.reports[-1])
            if self.step == self.steps or time.monotonic() - saved_at >= save_seconds:
                state.save(self._saved())
                saved_at = time.monotonic()

    def _train_step(self) -> None:
        options, progress = self._options, self.step / self.steps
        torch.manual_seed((options.seed << 32) + self.step)  # for models with dropout
        for group in self._optimiser.param_groups:
            group["lr"] = options.learning_rate * rate_share((self.step + 1) / self.steps)
        batch = torch.from_numpy(self._mixture.batch(self.step, options.batch)).to(self._device)
        self.model.train()
        self.activation.reset()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            logits = self.model(batch, use_cache=False).logits[:, :-1].float()
            loss = _surprise(logits, batch)
            wanted = loss
            if self._teacher is not None:
                with torch.no_grad():
                    aim = self._teacher(batch, use_cache=False).logits[:, :-1].float()
                wanted = (1 - options.distil) * loss + options.distil * _divergence(aim, logits)
        penalty = (self.activation.layer_magnitudes.float() / self._units).mean()
        wanted = wanted + options.l1 * penalty_share(progress) * penalty
        self._check_finite("the loss", wanted)
        self._optimiser.zero_grad()
        wanted.backward()
        self._check_finite("the gradient", torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP))
        self._optimiser.step()
        new = loss.item()
        self.loss = new if math.isnan(self.loss) else self.loss + _NEWEST * (new - self.loss)

    def _check_finite(self, name: str, value: Any) -> None:
        if not math.isfinite(seen := value.item()):
            fix = "start again with a lower `learning_rate` and another `work`"
            raise UserError(f"{name} is {seen} at step {self.step + 1} of {self.steps}: {fix}")

    def finish(self, seconds: float) -> Sparsified:
        """Rounds the weights as they will be written, and chooses the threshold for these."""
        stored = stored_type(self._original)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(stored))
                if not bool(torch.isfinite(parameter).all()):
                    raise UserError(f"a weight is too large for the checkpoint's type, {stored}")
        perplexity, zeros = self._measure()
        scale = self.activation.gate_scale
        tried = [(0.0, perplexity, sum(zeros) / len(zeros))]
        chosen = 0.0, perplexity, zeros
        for share in _THRESHOLDS:
            threshold = float(torch.tensor(share * scale, dtype=torch.float32))
            self.activation.threshold = threshold
            seen, found = self._measure()
            tried.append((threshold, seen, sum(found) / len(found)))
            if seen <= perplexity * MOST_LOSS:
                chosen = threshold, seen, found
            if seen > 1.5 * perplexity:
                break
        self.activation.threshold = chosen[0]
        return Sparsified(self.original_perplexity, self.reports, tried, *chosen, seconds)

    def _measure(self) -> tuple[float, list[float]]:
        """Perplexity of the held-out windows, and zeros by layer."""
        self.activation.reset()
        self.activation.counting = True
        perplexity = self._perplexity()
        self.activation.counting = False
        return perplexity, self.activation.zeros

    def _perplexity(self) -> float:
        self.model.eval()
        total, windows = 0.0, torch.from_numpy(self._mixture.held_out)
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            for batch in windows.split(self._options.batch):
                on_device = batch.to(self._device)
                logits = self.model(on_device, use_cache=False).logits[:, :-1].float()
                total += float(_surprise(logits, on_device)) * len(batch)
        return math.exp(min(total / len(windows), 700.0))

    def _magnitudes(self) -> Any:
        """``[layers]``, the mean activations at the start: the units of the penalty."""
        self.model.eval()
        self.activation.reset()
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            windows = torch.from_numpy(self._mixture.held_out)[: self._options.batch]
            self.model(windows.to(self._device), use_cache=False)
        return self.activation.layer_magnitudes.float().clamp_min(1e-12)


def _surprise(logits: Any, batch: Any) -> Any:
    """Mean surprise of each window's tokens but the first, nats."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def _divergence(aim: Any, logits: Any) -> Any:
    """Mean Kullback-Leibler divergence of the model's predictions from the original's, nats."""
    logs = [torch.log_softmax(each, dim=-1).flatten(0, 1) for each in (logits, aim)]
    return torch.nn.functional.kl_div(*logs, log_target=True, reduction="batchmean")


def _check(options: SparsifyOptions, output: Path) -> None:
    if options.activation not in KINDS:
        raise UserError(f"activation {options.activation!r}: choose from {', '.join(KINDS)}")
    if not 0 <= options.distil <= 1:
        raise UserError(f"`distil` {options.distil:g}: a share of the loss from 0 to 1 is needed")
    if not options.learning_rate > 0:
        raise UserError(f"`learning_rate` {options.learning_rate:g}: a number above 0 is needed")
    if not options.l1 >= 0:
        raise UserError(f"l1 {options.l1:g}: a number of at least 0 is needed")
    if options.context < 2:
        raise UserError(f"a context of {options.context}: at least 2 tokens are needed")
    if output.exists() or not output.parent.is_dir():
        raise UserError(f"{output}: a new folder in one that exists is needed")


def _device(name: str | None) -> Any:
    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, products would not repeat
    try:
        torch.empty(1, device=wanted)
        return torch.device(wanted)
    except (RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split())[:120]
        raise UserError(f"`device` {wanted}: {said}; cpu always works") from None


def _identity(original: Original, texts: Sequence[NamedText], options: SparsifyOptions) -> dict[str, Any]:
    """Everything that decides about the weights of a run: nobody goes on with other options by mistake."""
    seen = {text.name: hashlib.sha256(text.text.encode()).hexdigest()[:16] for text in texts}
    files = sorted(original.folder.glob("*.safetensors")) + sorted(original.folder.glob("*.bin"))
    return {
        **asdict(options),
        "texts": seen,
        "shares": [text.share for text in texts],
        "config": json.dumps(original.config, sort_keys=True),
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }


def _picture(name: str, found: Sparsified) -> str:
    trained = Curve("during training", [(each.mean_zeros, each.perplexity) for each in found.reports])
    raised = Curve("by threshold", [(zeros, perplexity) for _, perplexity, zeros in found.thresholds])
    level = "the original", found.original_perplexity
    return sparsity_picture(f"Perplexity and zeros: {name}", [trained, raised], level)
