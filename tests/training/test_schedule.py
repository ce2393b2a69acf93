"""The schedule as a callback of transformers' Trainer; a plain loop is the truth."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hotcold.errors import UserError

torch = pytest.importorskip("torch", reason="training needs torch")
transformers = pytest.importorskip("transformers", reason="training needs transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from hotcold.training import SparsityPenalty, SparsitySchedule, make_sparse  # noqa: E402

LLAMA = Path(__file__).parent.parent / "data" / "tiny-llama"
ROWS = torch.randint(3, 200, (64, 24), generator=torch.Generator().manual_seed(7))
STAGES = ((0.25, 0.5), (1.0, 1.0))


def sparse_model() -> Any:
    return make_sparse(transformers.AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32))


def trainer(model: Any, folder: Path, callback: Any = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 1e-2, "optim": "sgd",
        "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=str(folder), **settings | changes)
    labels = ROWS.clone()
    labels[::3, :12] = -100  # batches of a step have different numbers of tokens
    data = [{"input_ids": ids, "labels": each} for ids, each in zip(ROWS, labels, strict=True)]
    callback = callback or SparsitySchedule(3.0, STAGES)
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback])


class Reporter(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """A callback after the schedule, as reporters are that show its figures."""

    zeros: ClassVar[list[float]]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.zeros.extend([logs["zeros"]] if "loss" in logs else [])


def weights(model: Any) -> Any:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def test_the_trainer_adds_the_penalty(tmp_path: Path) -> None:
    """Accumulated batches count by their tokens, as their losses do."""
    model, loop = sparse_model(), sparse_model().train()
    run = trainer(model, tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    run.add_callback(Reporter)
    Reporter.zeros = []
    run.train()
    penalty, schedule = SparsityPenalty(loop), SparsitySchedule(3.0, STAGES)
    optimiser = torch.optim.SGD(loop.parameters(), lr=1e-2)
    labels = torch.stack([each["labels"] for each in run.train_dataset])
    for step in range(8):
        penalty.weight = schedule.weight_at(step / 8)
        optimiser.zero_grad()
        items = (labels[8 * step : 8 * step + 8, 1:] != -100).sum()
        for at in (8 * step, 8 * step + 4):
            ids, own = ROWS[at : at + 4], labels[at : at + 4]
            tokens = (own[:, 1:] != -100).sum()
            ((loop(ids, labels=own).loss + penalty()) * tokens / items).backward()
        optimiser.step()
    assert torch.allclose(weights(model), weights(loop), atol=1e-6)
    assert not torch.allclose(weights(model), weights(sparse_model()), atol=1e-3)
    logs = [each for each in run.state.log_history if "sparsity_penalty" in each]
    assert len(logs) == 8 and 0.7 < logs[0]["zeros"] < 0.8
    assert Reporter.zeros == [each["zeros"] for each in logs]
    assert logs[0]["sparsity_penalty"] == 0 and logs[-1]["sparsity_penalty"] > 1
    assert not model._forward_hooks


def test_a_resumed_trainer_has_the_units_of_the_start(tmp_path: Path) -> None:
    whole, again = sparse_model(), sparse_model()
    trainer(whole, tmp_path / "whole", save_strategy="steps", save_steps=4).train()
    checkpoint = tmp_path / "whole" / "checkpoint-4"
    run = trainer(again, tmp_path / "again")
    run.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(weights(whole), weights(again))
    state = (checkpoint / "trainer_state.json").read_text(encoding="utf-8")
    (checkpoint / "trainer_state.json").write_text(state.replace("_units", "others"), encoding="utf-8")
    with pytest.raises(UserError, match="the checkpoint of step 4 has no units of the penalty"):
        trainer(sparse_model(), tmp_path / "third").train(resume_from_checkpoint=str(checkpoint))


def test_a_schedule_of_two_runs_has_the_units_of_each(tmp_path: Path) -> None:
    schedule, other, model, alone = (
        SparsitySchedule(3.0, STAGES),
        sparse_model(),
        sparse_model(),
        sparse_model(),
    )
    for layer in other.model.layers:
        layer.mlp.up_proj.weight.data *= 3
    trainer(other, tmp_path, schedule, max_steps=1).train()
    trainer(model, tmp_path, schedule).train()
    trainer(alone, tmp_path).train()
    assert torch.equal(weights(model), weights(alone))


def test_what_the_schedule_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gave no loss to add the penalty to"):
        trainer(sparse_model(), tmp_path, label_smoothing_factor=0.1).train()
    with pytest.raises(UserError, match=r"stages end at \[0.5, 0.2\]: shares of the run in ascending order"):
        SparsitySchedule(0.3, ((0.5, 0.0), (0.2, 1.0)))
    for weight in (-1, math.inf, math.nan):
        for make in (SparsitySchedule, partial(SparsityPenalty, sparse_model())):
            with pytest.raises(UserError, match=f"weight {weight}: a number of at least 0 is needed"):
                make(weight)
