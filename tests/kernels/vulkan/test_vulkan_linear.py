"""Products, embedding and predicting on Vulkan's devices where the op table (tests/support/vulkan/table.py)
does not look: programs of every size, weights of extreme values, matrices in parts, and work cut into
submits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.bits import same_bits
from support.op_truth import Row, make_batch, plain_batch, random_rows, random_tensor, rng, to_bits
from support.ordered_dot import OrderedMatrix
from support.vulkan.cases import TYPES

from hotcold.errors import UserError
from hotcold.formats.blocks import BLOCK_TYPES, Tensor, quantise
from hotcold.kernels import open_backend
from hotcold.kernels.backend import Batch, BatchLimits, PredictorTensors, Rows
from hotcold.kernels.vulkan import linear
from hotcold.kernels.vulkan.recording import Cut, Dispatch, Recording

pytestmark = pytest.mark.one_driver  # the op table looks at the second one

MOST = 40  #: rows of a step


def buffer(backend: Any, values: np.ndarray) -> Any:
    made = backend.zeros(values.shape, values.dtype)
    backend.write(made, values)
    return made


class Product:
    """A matrix on a device, with input and output of a step, and what the output must be."""

    def __init__(self, backend: Any, tensor: Tensor, x: np.ndarray) -> None:
        bias = random_rows(rng("bias"), tensor.shape[0])
        self.backend, self.batch = backend, Batch(BatchLimits(len(x), 1, 1, 1))
        self.matrix = backend.matrix(tensor, bias)
        self.expected = OrderedMatrix(tensor, bias).dot(x)
        self.x, self.out = buffer(backend, x), backend.zeros((len(x), tensor.shape[0]))

    def program(self, rows: int | None) -> Any:
        return self.backend.record(
            lambda: self.backend.linear(self.x, [self.matrix], self.batch, [self.out]), rows
        )

    def check(self, program: Any, rows: int, decode: int) -> None:
        """Rows beyond those of the step are not touched."""
        self.backend.write(self.out, np.full((self.batch.limits.tokens, self.matrix.shape[0]), 7, np.float32))
        self.batch.counts[:] = (rows, decode, 0, 1)
        program.run()
        out = self.backend.read(self.out)
        same_bits(out[:rows], self.expected[:rows])
        assert (out[rows:] == 7).all()


@pytest.mark.parametrize("type", TYPES)
def test_a_row_is_the_same_in_programs_of_every_size(vulkan: Any, type: str) -> None:
    """Alone or among others, as a decode row or of a prompt; as many as there is room for, or fewer."""
    columns = {1: 97, 32: 1056, 64: 1088, 128: 1152, 256: 768}[BLOCK_TYPES[type].weights]
    tensor = random_tensor(rng("sizes", type), type, 13, columns)
    product = Product(vulkan, tensor, random_rows(rng("sizes"), MOST, columns))
    sizes, at = (1, 2, 4, 8, 16), TYPES.index(type)  # all of some types, and some of all
    for size in sizes if at < 3 else {sizes[at % 5], sizes[(at + 2) % 5]}:
        program = product.program(size)
        for rows in {size, max(1, size - 3)}:
            product.check(program, rows, rows)
    program = product.program(None)
    for rows, decode in ((MOST, 16), (MOST - 1, 0), (33, 3), (1, 1)):
        product.check(program, rows, decode)


@pytest.mark.parametrize("type", [name for name in TYPES if BLOCK_TYPES[name].weights > 1])
def test_scales_too_small_for_a_devices_float16(vulkan: Any, type: str) -> None:
    """Denormal ones, which models have, keep all their bits."""
    columns = max(64, BLOCK_TYPES[type].weights)
    tensor = random_tensor(rng("small", type), type, 9, columns, scale=2.0**-22)
    x = random_rows(rng("small"), 20, columns)
    product = Product(vulkan, tensor, x)
    assert (product.expected != 0).mean() > 0.8
    product.check(product.program(4), 4, 4)
    product.check(product.program(None), 20, 0)


def test_any_float16_is_a_weight(vulkan: Any) -> None:
    """Denormal values too; embedded they keep their bits, infinities and the sign of zero among them."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[(halves & 0x7C00) != 0x7C00]
    tensor = Tensor(BLOCK_TYPES["F16"], (len(halves) // 128, 128), halves.view(np.uint8).reshape(-1, 256))
    product = Product(vulkan, tensor, random_rows(rng("halves"), 4, 128))
    product.check(product.program(4), 4, 4)

    halves = np.array([0x7C00, 0xFC00, 0x8000, 1, 0x83FF, 0x7BFF], "<u2")
    table = Tensor(BLOCK_TYPES["F16"], (1, 6), halves.view(np.uint8).reshape(1, 12))
    batch, out = plain_batch(vulkan, 1), vulkan.zeros((4, 6))
    vulkan.embed(vulkan.matrix(table), batch, out)
    same_bits(vulkan.read(out)[:1], table.dequantise())


def with_info(monkeypatch: pytest.MonkeyPatch, backend: Any, **changed: int) -> None:
    info = {name: getattr(backend.info, name) for name in ("name", "max_range", "max_allocation")}
    monkeypatch.setattr(backend, "info", SimpleNamespace(**{**info, **changed}))


@pytest.mark.parametrize("type", ["Q6_K", "F16"])
def test_matrices_in_parts(vulkan: Any, monkeypatch: pytest.MonkeyPatch, type: str) -> None:
    """Larger than one range of the device."""
    tensor = random_tensor(rng("parts"), type, 150, 256)
    with_info(monkeypatch, vulkan, max_range=70 * tensor.nbytes // 150)
    product = Product(vulkan, tensor, random_rows(rng("parts"), MOST, 256))
    assert [part.rows for part in product.matrix.parts] == [64, 64, 22]
    product.check(product.program(2), 2, 2)
    product.check(product.program(None), MOST, 5)

    batch = make_batch(vulkan, [Row(0, token=t) for t in (63, 64, 127, 128, 149, 0)])
    out = vulkan.zeros((batch.limits.tokens, 256))
    vulkan.embed(product.matrix, batch, out)
    same_bits(vulkan.read(out)[:6], tensor.dequantise()[batch.tokens[:6]])


def test_rows_that_no_range_can_hold(vulkan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_info(monkeypatch, vulkan, max_range=100)
    tensor = random_tensor(rng(), "F16", 2, 64)
    message = f"rows of 64 columns in F16 take 128 bytes: {vulkan.info.name} allows ranges of 100$"
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        vulkan.matrix(tensor)


def test_long_work_is_cut_into_submits(vulkan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between matrices, and within one."""
    monkeypatch.setattr(Recording, "MOST_WORK", 70 * 96 * MOST)
    product = Product(vulkan, random_tensor(rng("cut"), "Q8_0", 200, 96), random_rows(rng("cut"), MOST, 96))
    recording = Recording(vulkan, product.batch, MOST)
    args = product.x, [product.matrix] * 2, [product.out] * 2
    linear.linear(recording, *args, accumulate=False, rows=Rows.TOKENS)
    assert sum(isinstance(step, Cut) for step in recording.steps) == 2 * 4 - 1
    product.check(product.program(None), MOST, 0)

    few = Recording(vulkan, product.batch, 1)
    linear.linear(few, *args, accumulate=False, rows=Rows.TOKENS)
    assert not any(isinstance(step, Cut) for step in few.steps)


def test_many_rows_of_logits(vulkan: Any) -> None:
    """More than one pass of 16."""
    tensor = random_tensor(rng("logits"), "Q4_0", 30, 64)
    batch = make_batch(vulkan, [], [Row(t) for t in range(50)], logits=list(range(37)))
    x = random_rows(rng("logits"), batch.limits.logits, 64)
    out = vulkan.zeros((batch.limits.logits, 30))
    vulkan.linear(buffer(vulkan, x), [vulkan.matrix(tensor)], batch, [out], rows=Rows.LOGITS)
    result = vulkan.read(out)
    same_bits(result[:37], OrderedMatrix(tensor).dot(x[:37]))
    assert not result[37:].any()


def test_logits_of_a_small_program(vulkan: Any) -> None:
    """They may be more than its rows."""
    tensor, x = random_tensor(rng("head"), "Q8_0", 9, 96), random_rows(rng("head"), 16, 96)
    batch = make_batch(vulkan, [Row(0), Row(1)], logits=[1, 0, 1, 1, 0])
    given, out = buffer(vulkan, x), vulkan.zeros((16, 9))
    matrix = vulkan.matrix(tensor)
    program = vulkan.record(lambda: vulkan.linear(given, [matrix], batch, [out], rows=Rows.LOGITS), 2)
    for n in (5, 1, 0):
        vulkan.write(out, np.full((16, 9), 7, np.float32))
        batch.counts[2] = n
        program.run()
        same_bits(vulkan.read(out, 0, n), OrderedMatrix(tensor).dot(x[:n]))
        assert (vulkan.read(out, n) == 7).all()


def test_the_smallest_input_that_counts(vulkan: Any) -> None:
    """A block whose largest value is below 2^-100 is zero."""
    largest = [2.0**-100, np.nextafter(np.float32(2.0**-100), np.float32(0)), 2.0**-99, 2.0**-101]
    x = np.zeros((4, 32), np.float32)
    x[:, 5], x[:, 7] = largest, np.multiply(largest, -0.25)
    tensor = quantise(np.ones((3, 32), np.float32) * np.float32(2.0**14), "Q8_0")
    product = Product(vulkan, tensor, x)
    product.matrix = vulkan.matrix(tensor)
    product.expected = OrderedMatrix(tensor).dot(x)
    assert ((product.expected != 0) == np.array([True, False, True, False])[:, None]).all()
    product.check(product.program(4), 4, 4)


def test_a_score_at_its_threshold_is_a_candidate(vulkan: Any) -> None:
    """And NaN never is; a neuron's bit is that of its number, in words of 64."""
    eye = np.eye(96, dtype=np.float32)
    first, second = quantise(eye, "F32"), quantise(np.vstack([eye, eye])[:150], "F32")
    threshold = random_rows(rng("threshold"), 150)
    x = np.vstack([threshold[:96], np.nextafter(threshold[:96], np.float32(-2)), np.full(96, np.nan)])
    x = x.astype(np.float32)
    weights = vulkan.predictor_weights(PredictorTensors(first, second, threshold, relu=False))
    batch, mask = plain_batch(vulkan, 3), vulkan.zeros((6, 3), np.uint64)
    vulkan.predict(buffer(vulkan, np.pad(x, ((0, 3), (0, 0)))), weights, batch, mask)
    with np.errstate(invalid="ignore"):
        expected = np.hstack([x, x])[:, :150] >= threshold
    assert expected[0, :96].all() and not expected[2].any() and 0 < expected[1].sum() < expected[0].sum()
    np.testing.assert_array_equal(to_bits(vulkan.read(mask)[:3], 150), expected)


@pytest.mark.parametrize("type", ["F16", "Q4_K"])
def test_results_do_not_depend_on_the_tile(vulkan: Any, type: str) -> None:
    """Programs of up to 64 rows have tiles of 64 outputs by 32 rows, others of 128 by 64."""
    x = random_rows(rng("tiles"), 140, 256)
    product = Product(vulkan, random_tensor(rng("tiles", type), type, 300, 256), x)
    for rows, groups in ((64, (2, 5, 1)), (65, (2, 3, 1)), (140, (3, 3, 1))):
        recording = Recording(vulkan, product.batch, rows)
        linear.linear(recording, product.x, [product.matrix], [product.out], False, Rows.TOKENS)
        step = recording.steps[-1]
        assert isinstance(step, Dispatch) and step.groups == groups
        product.check(product.program(rows), rows, 0)


def test_what_is_not_in_a_table(vulkan: Any) -> None:
    """Is refused when the program runs, which then does nothing."""
    table = vulkan.matrix(quantise(np.ones((5, 32), np.float32), "F32"))
    batch = make_batch(vulkan, [Row(0, token=4), Row(3, token=5)])
    out = vulkan.zeros((batch.limits.tokens, 32))
    program = vulkan.record(lambda: vulkan.embed(table, batch, out), 2)
    with pytest.raises(ValueError, match="token"):
        program.run()
    assert not vulkan.read(out).any()
    batch.tokens[1] = 0
    program.run()
    assert (vulkan.read(out)[:2] == 1).all()


def test_what_others_made_is_refused(vulkan: Any) -> None:
    tensor, batch = random_tensor(rng(), "F32", 2, 32), plain_batch(vulkan, 1)
    x, out = vulkan.zeros((4, 32)), vulkan.zeros((4, 2))
    message = "weights of ReferenceMatrix: weights made by this backend are needed"
    with pytest.raises(TypeError, match=message):
        vulkan.linear(x, [open_backend("reference").matrix(tensor)], batch, [out])
    with pytest.raises(TypeError, match="a ndarray: buffers of this device are needed"):
        vulkan.linear(np.zeros((4, 32), np.float32), [vulkan.matrix(tensor)], batch, [out])
