"""Trains a model until most of its neurons are zero: the recipe of TurboSparse and ProSparse.

The activation becomes dReLU (arXiv 2406.05955) or ReLU, and training continues, optionally with the original
as teacher. An L1 penalty on the activations grows along sines, stage by stage (ProSparse, arXiv 2402.13516,
section 3). At the end the threshold of the gate rises as far as predictions allow (FATReLU, same paper). The
weights depend only on options and files: a run that is stopped anywhere continues from its last state, and
ends with equal weights."""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotcold.errors import UserError
from hotcold.formats.files import output_file
from hotcold.training.libraries import library_errors, torch
from hotcold.training.predictor import reproducible
from hotcold.training.processes import process_count, process_rank
from hotcold.training.run_state import RunState
from hotcold.training.saving import check_new, save_sparse
from hotcold.training.sparse_checkpoint import Original, load_model, open_original, stored_type
from hotcold.training.sparse_model import KINDS, Measured
from hotcold.training.sparsify_run import Report as Report
from hotcold.training.sparsify_run import Run
from hotcold.training.sparsify_run import SparsifyOptions as SparsifyOptions
from hotcold.training.thresholds import MODES, Thresholds, choose_thresholds
from hotcold.training.token_data import Encoder, Mixture, Source, hash_of
from hotcold.values import real, whole

#: Options that are not part of a state's identity: they have no effect before the end of a run.
_LATER = ("tokens", "threshold", "control")


@dataclass(frozen=True)
class Sparsified:
    """The result of a run. Thresholds were chosen on other text than the text of these figures."""

    original: Measured  #: before training
    measured: Measured  #: the sparse model as it is written, with its divergence from the original
    control: Measured | None  #: the original, trained on the same tokens
    control_divergence: float | None  #: divergence of the sparse model from the control, nats
    reports: list[Report]
    choice: Thresholds
    seconds: float = field(compare=False, default=0.0)  #: since the last start

    def report(self) -> dict[str, Any]:
        return asdict(self)


def sparsify(
    checkpoint: Path,
    sources: Sequence[Source],
    output: Path,
    options: SparsifyOptions,
    *,
    device: str | None = None,
    work: Path | None = None,
    held_out: Path | None = None,
    cache: Path | None = None,
    log: Path | None = None,
    force: bool = False,
    report: Callable[[Report], None] = lambda report: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda text: None,
    save_seconds: float = 300,
) -> Sparsified:
    """Makes a checkpoint sparse; ``output`` is a checkpoint folder, which appears complete or not at all.

    Under torchrun, processes share each step's windows. ``work`` (``OUTPUT.work`` by default) holds the state
    of the run, saved every ``save_seconds`` and at SIGTERM and SIGINT, so that the same call continues. The
    folder stays, and a call with more tokens continues training. ``held_out`` is a text for measuring;
    without it, part of the texts' ends is used. ``cache`` holds token files (default: in ``work``), ``log``
    gets a JSON object for each step. A new run replaces an existing ``log`` only with ``force``. ``device``
    None is a GPU, if there is one.

    UserError: a value is not allowed, a folder is no checkpoint of a known form, a text is too short or of
    another form, memory or disk do not suffice, the loss is not a number, or ``work`` is another run's."""
    start = time.monotonic()
    _check(options)
    check_new(output)
    folder = work or output.with_name(output.name + ".work")
    if log is not None and not RunState(folder, {}).exists():
        output_file(log, force=force, inputs=[source.path for source in sources])
    original = open_original(checkpoint, options.activation)
    dtype = stored_type(original)
    whole("`context`", options.context, 2, original.context, f"the model has {original.context} positions")
    with _processes(), reproducible(None):
        if process_rank():  # only the first process reports
            report, progress, note = lambda figures: None, lambda done, total: None, lambda text: None
        place = _device(device)
        vocabulary = int(original.config["vocab_size"])
        encoder = Encoder(original.tokenizer, original.folder, vocabulary, options.special)
        token_files = cache or folder / "tokens"
        mixture = Mixture(sources, encoder, options.context, options.seed, token_files, held_out)
        state = RunState(folder, _identity(original, mixture, options))

        def trained(state: RunState, *, sparse: bool) -> Run:
            run = Run(original, mixture, options, place, sparse=sparse)
            run.check_disk(state)
            run.restore(state)
            for earlier_report in run.reports:
                report(earlier_report)
            run.train(state, report, progress, save_seconds, log if sparse else None, note)
            run.round_weights(dtype)
            return run

        run = trained(state, sparse=True)
        control = trained(state.beside("control"), sparse=False) if options.control else None
        choice = choose_thresholds(run.model, run.batches(mixture.choosing), options.threshold)
        assert run.original is not None
        done = Sparsified(
            run.original,
            run.measure(run.model, load_model(original, place)),
            run.measure(control.model) if control else None,
            run.measure(run.model, control.model).divergence if control else None,
            run.reports,
            choice,
            time.monotonic() - start,
        )
        save_sparse(run.model, output, original=original.folder, report=done.report(), dtype=dtype)
    return done


def _check(options: SparsifyOptions) -> None:
    """Raises UserError if an option has a value that no model allows."""
    if options.activation not in KINDS:
        raise UserError(f"activation {options.activation!r}: choose from {', '.join(KINDS)}")
    if options.threshold not in MODES:
        raise UserError(f"threshold {options.threshold!r}: choose from {', '.join(MODES)}")
    for name in ("tokens", "batch", "accumulate", "loss_chunk"):
        whole(f"`{name}`", getattr(options, name), 1)
    whole("seed", options.seed, 0, 2**31 - 1)
    real("`distil`", options.distil, 0, 1, "a share of the loss")
    real("`learning_rate`", options.learning_rate, 1e-30, math.inf)
    real("l1", options.l1, 0, math.inf)


@contextmanager
def _processes() -> Any:
    """Joins the other processes, if torchrun started several. UserError: memory does not suffice."""
    joins = int(os.environ.get("WORLD_SIZE", "1")) > 1 and process_count() == 1
    if joins:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    except torch.OutOfMemoryError:
        fix = "a smaller batch, a shorter context or checkpointing takes less"
        raise UserError(f"out of memory: {fix}") from None
    finally:
        if joins:
            torch.distributed.destroy_process_group()


def _device(name: str | None) -> Any:
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    wanted = name or (gpu if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, products are not deterministic
    with library_errors(f"`device` {wanted} cannot be used (cpu always works)"):
        torch.empty(1, device=wanted)
    return torch.device(wanted)


def _identity(original: Original, mixture: Mixture, options: SparsifyOptions) -> dict[str, Any]:
    """All inputs that decide the weights, by content, so that a run continues with copied or moved files."""
    files = sorted(original.folder.glob("*.safetensors")) + sorted(original.folder.glob("*.bin"))
    chosen = {key: value for key, value in asdict(options).items() if key not in _LATER}
    return {
        **chosen,
        "texts": mixture.identity,
        "shares": [source.share for source in mixture.sources],
        "config": original.config,
        "weights": [hash_of(file) for file in files],
        "processes": process_count(),
    }
