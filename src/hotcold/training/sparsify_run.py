"""One training run of ``hotcold sparsify``: steps, saved states, and stopping at signals."""

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotcold.errors import UserError
from hotcold.training.libraries import summary_writer, torch, transformers
from hotcold.training.processes import in_first_process, process_count, process_rank, sum_of_processes
from hotcold.training.run_state import RunState
from hotcold.training.schedule import penalty_share
from hotcold.training.sparse_checkpoint import Original, load_model
from hotcold.training.sparse_model import (
    IGNORED,
    Kind,
    Measured,
    SparsityPenalty,
    make_sparse,
    measure_sparsity,
)
from hotcold.training.thresholds import Mode
from hotcold.training.token_data import Mixture, inputs_and_labels

REPORTS = 10  #: reports of a run
_WARM, _LAST_RATE = 0.03, 0.1  # share of the steps in which the learning rate rises, and the last share of it
_CLIP = 1.0  # largest norm of a step's gradient
_NEWEST = 0.05  # weight of the newest loss in the running mean


@dataclass(frozen=True)
class SparsifyOptions:
    """Options of a run; its weights depend on all of them."""

    tokens: int  #: to train on
    activation: Kind = "drelu"
    learning_rate: float = 5e-5  #: the highest; TurboSparse's
    l1: float = 0.3  #: the highest penalty, in nats for the first activations
    context: int = 512  #: tokens of a window
    batch: int = 8  #: windows of a forward pass
    accumulate: int = 1  #: forward passes of a step, in each process
    checkpointing: bool = False  #: recomputes activations in the backward pass, which takes less memory
    loss_chunk: int = 1024  #: tokens whose logits are in memory at a time
    distil: float = 0.0  #: share of the loss that is the divergence from the original's predictions
    threshold: Mode = "one"
    control: bool = False  #: also trains the original on the same tokens, for comparison
    special: bool = True  #: names of control tokens in texts become the tokens
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """The progress of a run, and the model's quality and sparsity on held-out text."""

    tokens: int
    loss: float  #: nats, a running mean over training text
    perplexity: float
    zeros: list[float]  #: share of activations that are zero, by layer

    @property
    def mean_zeros(self) -> float:
        return sum(self.zeros) / max(1, len(self.zeros))


def rate_share(progress: float) -> float:
    """The share of the learning rate: it rises linearly, and falls along a cosine."""
    if progress < _WARM:
        return progress / _WARM
    fallen = (1 + math.cos(math.pi * (progress - _WARM) / (1 - _WARM))) / 2
    return _LAST_RATE + (1 - _LAST_RATE) * fallen


class Log:
    """A file of one JSON object a line; with TensorBoard installed, a folder of its events, too.

    A run that continues drops the lines of steps that it repeats, and TensorBoard their events."""

    def __init__(self, path: Path | None, step: int) -> None:
        self._path, self._begun, self._events = path, time.monotonic(), None
        if path is None:
            return
        try:
            lines = path.read_text(encoding="utf-8").splitlines(True) if step and path.exists() else []
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            path.write_text("".join(kept), encoding="utf-8")
            if writer := summary_writer():
                self._events = writer(path.with_suffix(".tensorboard"), purge_step=step + 1)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "strerror", None) or "it has lines of another kind"
            raise UserError(f"{path} cannot be the log ({reason}): name a new file") from None

    def write(self, step: int, **values: Any) -> None:
        if self._path is None:
            return
        line = json.dumps({"step": step, **values, "seconds": round(time.monotonic() - self._begun, 3)})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if self._events is not None:
            zeros = enumerate(values.pop("zeros_by_layer", ()))
            by_layer = {f"zeros_by_layer/{layer}": share for layer, share in zeros}
            for name, value in (values | by_layer).items():
                self._events.add_scalar(name, value, step)
            self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


@contextmanager
def stopping() -> Iterator[list[int]]:
    """Yields a list that collects SIGTERM and SIGINT inside the block; a second signal works as before."""
    got: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield got  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def note(number: int, frame: Any) -> None:
        got.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield got
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def head_logits(model: Any, hidden: Any) -> Any:
    """Logits of hidden states ``[T, D]``: the model's forward pass without its layers, so that scales and
    soft caps of logits apply."""
    body = getattr(model, model.base_model_prefix)
    output = transformers().modeling_outputs.MoeModelOutputWithPast(last_hidden_state=hidden[None])
    body.forward = lambda *args, **kwargs: output
    try:
        return model(inputs_embeds=hidden[None], use_cache=False).logits[0]
    finally:
        del body.forward


class Run:
    """A model in training: the sparse one, or its control, which keeps the original activation and needs no
    reports."""

    def __init__(
        self, original: Original, mixture: Mixture, options: SparsifyOptions, device: Any, *, sparse: bool
    ) -> None:
        self._mixture, self._options, self._device = mixture, options, device
        self._rank, self._processes = process_rank(), process_count()
        self._windows = options.batch * options.accumulate * self._processes
        self.steps = max(1, options.tokens // (self._windows * options.context))
        self._half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        # A GPU lacks deterministic versions of a few operations, which only warn.
        torch.use_deterministic_algorithms(True, warn_only=device.type != "cpu")
        self.model = load_model(original, device)
        self.original = self.measure(self.model) if sparse else None  #: before the activation changes
        self._teacher = None
        if options.distil and sparse:
            self._teacher = load_model(original, device, torch.bfloat16 if self._half else torch.float32)
            self._teacher.eval().requires_grad_(False)
        self._penalty = SparsityPenalty(make_sparse(self.model, options.activation)) if sparse else None
        if options.checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self._optimiser = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
        self.step, self._begun, self.loss = 0, 0, math.nan
        self.reports: list[Report] = []

    def batches(self, rows: Any) -> list[dict[str, Any]]:
        """This process's part of the held-out windows."""
        rows, size = rows[self._rank :: self._processes], self._options.batch
        return [inputs_and_labels(rows[at : at + size]) for at in range(0, len(rows), size)]

    def measure(self, model: Any, reference: Any = None) -> Measured:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            return measure_sparsity(model, self.batches(self._mixture.judging), reference)

    def check_disk(self, state: RunState) -> None:
        """Raises UserError if the disk lacks space for the output and two states (three numbers a weight)."""
        needed = 4 * 7 * sum(parameter.numel() for parameter in self.model.parameters())
        free = shutil.disk_usage(state.folder.parent).free
        if needed > free and not state.exists():
            place = f"{free} are free in {state.folder.parent}"
            raise UserError(f"a run needs {needed} bytes in all, and {place}: give another `work`")

    def restore(self, state: RunState) -> None:
        """Continues from the last state. A finished run continues with more tokens: the penalty stays, and
        the learning rate rises and falls again. UserError: the state does not fit the options."""
        if (saved := state.load()) is None:
            return
        self.step, steps = saved["step"], saved["steps"]
        if self.steps != steps and (self.step < steps or self.steps < steps):
            per_step = self._windows * self._options.context
            got = f"{state.folder} holds a run of {steps * per_step} tokens, {self.step * per_step} done"
            fix = "finish it with these `tokens` and then give more, or give another `work`"
            raise UserError(f"{got}: {fix}")
        self._begun = saved["begun"] if self.steps == steps else self.step
        self.model.load_state_dict(saved["model"])
        self._optimiser.load_state_dict(saved["optimiser"])
        self.loss = saved["loss"]
        self.reports = [Report(**report) for report in saved["reports"]]
        if self._penalty is not None:
            self._penalty.load_state_dict(saved["penalty"])

    def _saved(self) -> dict[str, Any]:
        for weights in self.model.parameters():  # a run must be able to continue from the state on disk
            self._check_finite("a weight", weights.detach().abs().max())
        return {
            "model": self.model.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "steps": self.steps,
            "begun": self._begun,
            "loss": self.loss,
            "penalty": self._penalty.state_dict() if self._penalty else {},
            "reports": [asdict(report) for report in self.reports],
        }

    def train(
        self,
        state: RunState,
        report: Callable[[Report], None],
        progress: Callable[[int, int], None],
        save_seconds: float,
        log: Path | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Trains to the last step. SIGTERM and SIGINT save the state, and then have their usual effect."""
        per_step, saved_at = self._windows * self._options.context, time.monotonic()
        stop = False
        # From here on a signal saves the state, which the log belongs to.
        with stopping() as signals, closing(Log(None if self._rank else log, self.step)) as lines:
            while self.step < self.steps:
                figures = self._train_step()
                self.step += 1
                tokens = self.step * per_step
                lines.write(self.step, tokens=tokens, **figures)
                progress(tokens, self.steps * per_step)
                if self._penalty and self._reports_due(self.step) > self._reports_due(self.step - 1):
                    measured = self.measure(self.model)
                    self.reports.append(Report(tokens, self.loss, measured.perplexity, measured.zeros))
                    lines.write(self.step, perplexity=measured.perplexity, zeros_by_layer=measured.zeros)
                    report(self.reports[-1])
                late = time.monotonic() - saved_at >= save_seconds
                stop, save = self._agreed(bool(signals), late or self.step == self.steps)
                if stop or save:
                    in_first_process(lambda: state.save(self._saved()))
                    saved_at = time.monotonic()
                if stop:
                    break
        if stop or signals:  # a signal may have come during the last save
            note(f"stopped at step {self.step} of {self.steps}; the same command continues from there")
            signal.raise_signal(signals[0] if signals else signal.SIGTERM)

    def _reports_due(self, step: int) -> int:
        return (step - self._begun) * REPORTS // (self.steps - self._begun)

    def _agreed(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """True values for all processes: stop if any process must, save if the first process wants to."""
        flags = torch.tensor([stop, save and not self._rank], dtype=torch.int32, device=self._device)
        stop, save = sum_of_processes(flags).bool().tolist()
        return stop, save

    def _train_step(self) -> dict[str, float]:
        options = self._options
        torch.manual_seed((options.seed << 32) + self.step)  # for models with dropout
        progress = (self.step - self._begun) / (self.steps - self._begun)
        rate = rate_share((self.step + 1 - self._begun) / (self.steps - self._begun)) * options.learning_rate
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        if self._penalty is not None:
            self._penalty.weight = options.l1 * (1.0 if self._begun else penalty_share(progress))
        rows = self._mixture.batch(self.step, self._windows)
        learned = max(1, int((rows[:, 1:] >= 0).sum()))
        rows = rows[self._rank :: self._processes]
        self.model.train()
        self._optimiser.zero_grad()
        sums = torch.zeros(3, device=self._device)
        for part in np.split(rows, options.accumulate):
            sums += self._backward(part, learned)
        for weights in self.model.parameters():
            if weights.grad is not None:
                sum_of_processes(weights.grad)
        loss, penalty, zeros = sum_of_processes(sums).tolist()
        self._check_finite("the loss", loss + penalty)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self._check_finite("the gradient", norm)
        self._optimiser.step()
        self.loss = loss if math.isnan(self.loss) else self.loss + _NEWEST * (loss - self.loss)
        figures = {"loss": loss, "learning_rate": rate, "gradient_norm": float(norm)}
        if self._penalty is not None:
            figures |= {"penalty": penalty, "zeros": zeros}
        return figures

    def _backward(self, rows: Any, learned: int) -> Any:
        """Adds the gradient of some windows; returns their parts of the step's loss, penalty and zeros."""
        arrays = inputs_and_labels(rows).values()
        ids, labels = (torch.from_numpy(values).to(self._device) for values in arrays)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            loss, wanted = self._losses(ids, labels[:, 1:].flatten()) / learned
        penalty = zeros = torch.zeros((), device=self._device)
        if self._penalty is not None:
            parts = self._options.accumulate * self._processes
            penalty = self._penalty() / parts
            zeros = torch.stack(self._penalty.zeros).mean() / parts
        (wanted + penalty).backward()
        return torch.stack([loss.detach(), penalty.detach(), zeros]).float()

    def _losses(self, ids: Any, labels: Any) -> Any:
        """Sums over tokens: the cross-entropy, and the loss, which includes the teacher's part."""
        states = [self._states(self.model, ids)]
        if self._teacher is not None:
            with torch.no_grad():
                states.append(self._states(self._teacher, ids))
        total = torch.zeros(2, device=self._device)
        chunks = (values.split(self._options.loss_chunk) for values in (labels, *states))
        for parts in zip(*chunks, strict=True):
            total = total + torch.utils.checkpoint.checkpoint(self._loss_of, *parts, use_reentrant=False)
        return total

    def _states(self, model: Any, ids: Any) -> Any:
        body = getattr(model, model.base_model_prefix)
        return body(input_ids=ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)

    def _loss_of(self, labels: Any, states: Any, aims: Any = None) -> Any:
        logits = head_logits(self.model, states).float()
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        if aims is None:
            return torch.stack([loss, loss])
        used, share = labels != IGNORED, self._options.distil
        with torch.no_grad():
            aim = torch.log_softmax(head_logits(self._teacher, aims).float(), dim=-1)
        logs = [torch.log_softmax(logits, dim=-1)[used], aim[used]]
        divergence = torch.nn.functional.kl_div(*logs, log_target=True, reduction="sum")
        return torch.stack([loss, (1 - share) * loss + share * divergence])

    def _check_finite(self, name: str, value: Any) -> None:
        if not math.isfinite(number := float(value)):
            fix = "start again with a lower `learning_rate` and another `work`"
            raise UserError(f"{name} is {number} at step {self.step + 1} of {self.steps}: {fix}")

    def round_weights(self, dtype: Any) -> None:
        """Rounds the weights to the type of the output. UserError: a weight is too large."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(dtype))
                if not bool(torch.isfinite(parameter).all()):
                    raise UserError(f"a weight is too large for the checkpoint's type, {dtype}")
