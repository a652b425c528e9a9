"""Dtypes by NumPy's rules, vectors by np.matmul's, arrays of other libraries by DLPack: before anything is sent."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tilewire._arrays.dlpack import as_here
from tilewire._arrays.dtypes import promote
from tilewire._arrays.host import HostArray
from tilewire._arrays.lists import work_bytes_of
from tilewire._arrays.operands import prepare, prepare_inputs
from tilewire._types import Resident, TensorInfo

F32 = np.ones((2, 2), np.float32)


def described(dtype: str, shape: tuple[int, ...] = (2, 2)) -> Resident:
    return Resident("w", TensorInfo("w", shape, dtype, 0))


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (("float16", "float32"), "float32"),
        (("int32", "float32"), "float64"),
        (("int8", "float32"), "float32"),
        (("bfloat16", "bfloat16"), "bfloat16"),
        (("bfloat16", "float16"), "float32"),
        (("bfloat16", "float32"), "float32"),
        (("bfloat16", "float64"), "float64"),
        (("bfloat16", "int8"), "bfloat16"),
        (("bfloat16", "bool"), "bfloat16"),
        (("bfloat16", "uint8"), "bfloat16"),
        (("bfloat16", "int16"), "float32"),
        (("bfloat16", "uint16"), "float32"),
        (("bfloat16", "int32"), "float64"),
        (("bfloat16", "int64"), "float64"),
        (("float8_e4m3fn", "float16"), "float16"),
        (("float8_e5m2", "bfloat16"), "bfloat16"),
        (("float8_e5m2", "float32"), "float32"),
    ],
)
def test_promotion(names: tuple[str, ...], common: str) -> None:
    assert promote(names) == promote(reversed(names)) == common
    # Of float8 beside others ml_dtypes leaves it open.
    if not any(name.startswith("float8") for name in names):
        first, second = (np.ones(1, getattr(ml_dtypes, name, name)) for name in names)
        assert (first + second).dtype.name == common


def test_masked_elements_are_not_sent() -> None:
    with pytest.raises(TypeError, match="filled"):
        HostArray.of(np.ma.masked_greater(F32, 0))
    assert HostArray.of(np.ma.masked_greater(F32, 2)).data is not None


@pytest.mark.parametrize(
    "rows",
    [[F32[0], np.ma.masked_greater(F32[1], 0)], [[F32[0]], (np.ma.masked_greater(F32[1], 0),)], [1.0, np.ma.masked]],
    ids=["arrays", "nested", "number"],
)
def test_masked_elements_in_lists_are_not_sent(rows: list[Any]) -> None:
    with pytest.raises(TypeError, match=r"x: .*filled"):
        prepare("softmax", {"x": rows})
    with pytest.raises(TypeError, match="filled"):
        HostArray.of(rows)


def deep(depth: int) -> list[Any]:
    rows: list[Any] = [1.0]
    for _ in range(depth - 1):
        rows = [rows]
    return rows


def endless() -> list[Any]:
    rows: list[Any] = []
    rows.append(rows)
    return rows


@pytest.mark.parametrize(
    "rows", [endless(), [[1.0], [endless()]], deep(65), deep(5000)], ids=["itself", "within", "65", "5000"]
)
def test_lists_that_are_too_deep_are_named(rows: list[Any]) -> None:
    with pytest.raises(TypeError, match="x: lists in lists more than 64 deep"):
        prepare("softmax", {"x": rows})
    with pytest.raises(TypeError, match="x: lists in lists more than 64 deep"):
        prepare_inputs({"x": rows}, {})
    assert work_bytes_of(rows) > 0


def test_a_list_may_be_as_deep_as_an_array() -> None:
    # NumPy before 2 has no more than 32 dimensions.
    assert prepare("softmax", {"x": deep(32)}).arrays["x"].shape == (1,) * 32


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).bfloat16(),
        torch.ones(()).bfloat16(),
        torch.ones(3, requires_grad=True),
        torch.ones(3, device="meta"),
    ],
    ids=["bfloat16", "number", "gradient", "meta"],
)
def test_lists_of_tensors_that_numpy_cannot_read_say_what_to_do(tensor: torch.Tensor) -> None:
    with pytest.raises(
        TypeError, match=r"x: NumPy cannot read these arrays in a list \(.+\); join them, as by torch\.stack"
    ):
        prepare("softmax", {"x": [tensor, tensor]})
    assert prepare("softmax", {"x": [torch.ones(3)]}).arrays["x"].dtype == "float32"


def test_fractions_of_a_list_are_not_cut_off() -> None:
    i8 = F32.astype(np.int8)
    with pytest.raises(TypeError, match="bias: holds a fraction; int32 takes whole numbers"):
        prepare("matmul", {"a": i8, "b": i8, "bias": [1.5, 2]})
    assert prepare("matmul", {"a": i8, "b": i8, "bias": [1.0, 2]}).arrays["bias"].data.tolist() == [1, 2]
    floats = prepare("matmul", {"a": i8, "b": i8, "bias": [1.5, 2]}, out_dtype="float32")
    assert floats.arrays["bias"].data.tolist() == [1.5, 2]
    with pytest.raises(TypeError, match="x: holds a fraction; int64 takes whole numbers"):
        prepare_inputs({"x": [[0.5]]}, {"x": "int64"})


@pytest.mark.parametrize("names", [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "int8")])
def test_dtypes_that_nothing_holds(names: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match="no dtype holds"):
        promote(names)


@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        (F32, [[1, 2], [3, 4]], "float32"),
        (F32.astype(np.float16), [[1.5, 2], [3, 4]], "float16"),
        (F32.astype(ml_dtypes.bfloat16), [[1, 2], [3, 4]], "bfloat16"),
        (F32.astype(np.int8), [[1, 2], [3, 4]], "int8"),
        (F32.astype(np.float16), F32, "float32"),
        (described("float16"), [[1.0, 2.0], [3, 4]], "float16"),
        ("@w", [[1, 2], [3, 4]], "float32"),
        (F32, np.float16(1) * np.ones((2, 2), np.float16), "float32"),
        (((1, 2), (3, 4)), F32, "float32"),
    ],
)
def test_common_dtypes(a: Any, b: Any, dtype: str) -> None:
    prepared = prepare("matmul", {"a": a, "b": b})
    assert {array.dtype for array in prepared.arrays.values()} == {dtype}


@pytest.mark.parametrize(
    ("op", "operands", "message"),
    [
        (
            "matmul",
            {"a": F32.astype(np.int64), "b": F32},
            r"a: matmul does not take float64, which int64 becomes beside the other; type a\.astype",
        ),
        ("matmul", {"a": F32.astype(np.uint8), "b": F32.astype(np.int8)}, "take int16, which uint8 becomes beside"),
        ("matmul", {"a": F32, "b": described("float64")}, r"b: matmul does not take float64, as @w is; matmul takes"),
        ("matmul", {"a": F32, "b": F32.astype(np.float64)}, r"b: matmul does not take float64; type b\.astype"),
        ("softmax", {"x": np.arange(3)}, r"x: softmax does not take int64"),
        ("softmax", {"x": torch.ones(3, dtype=torch.float64)}, r"type x\.float\(\)"),
        ("softmax", {"x": np.ones(3, np.complex64)}, "x: dtype complex64 cannot be sent"),
        ("softmax", {"x": {"weight": F32}}, "x: dtype object cannot be sent, as NumPy makes of this dict"),
        ("softmax", {"x": (n for n in (1, 2))}, "NumPy makes of this generator; expected numbers"),
        ("softmax", {"x": [[1], [2, 3]]}, "x: "),
        ("add", {"a": F32, "b": [[1], [2, 3]]}, "b: a list of lists of unequal lengths"),
        ("add", {"a": F32, "b": [2**70]}, "b: a number of more than 64 bits"),
        ("add", {"a": F32, "b": torch.eye(2).to_sparse()}, "b: .*strided"),
        ("add", {"a": F32, "b": torch.ones(2, device="meta")}, "b: .*DLPack: Unknown device type meta"),
        ("add", {"a": F32.astype(np.int32), "b": 2**40}, "b: "),
        ("add", {"a": F32.astype(np.int8), "b": 3}, "a: add does not take int8"),
        ("matmul", {"a": F32, "b": described("float16")}, r"@w is float16 and cannot become float32.*np\.float16"),
        ("matmul", {"a": F32, "b": described("bfloat16")}, r"type a\.astype\(ml_dtypes\.bfloat16\)"),
        ("matmul", {"a": F32, "b": F32, "bias": np.ones(2)}, r"bias: float64 is not taken here"),
        ("matmul", {"a": F32, "b": "w"}, "neither an array nor the name"),
    ],
)
def test_operands_that_cannot_be_sent(op: str, operands: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        prepare(op, operands)


def test_a_resident_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="@w is a vector"):
        prepare("matmul", {"a": F32, "b": described("float32", (2,))})


def test_cast_is_for_what_the_op_does_not_take() -> None:
    prepared = prepare("matmul", {"a": F32.astype(np.float64), "b": described("float32")}, cast="float32")
    assert prepared.arrays["a"].dtype == "float32"
    assert prepare("add", {"a": np.ones(2), "b": 1}, cast="float32").arrays["a"].dtype == "float64"
    assert prepare("matmul", {"a": F32, "b": F32, "bias": np.ones(2)}, cast="float32").arrays["bias"].dtype == "float32"


@pytest.mark.parametrize("bias", [np.array([True, False]), [True, False], torch.tensor([True, False])])
@pytest.mark.parametrize("cast", [None, "float32"])
def test_a_mask_is_no_bias_of_scores(bias: Any, cast: str | None) -> None:
    with pytest.raises(TypeError, match=r"bias: booleans exclude no item.*np\.where\(bias, 0, -np\.inf\)"):
        prepare("search", {"a": F32, "b": F32, "bias": bias}, cast=cast)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "bias"),
    [
        ("int8", None, "int32"),
        ("int8", "float32", "float32"),
        ("float16", None, "float16"),
        ("float8_e5m2", None, "float32"),
    ],
)
def test_lists_as_bias(dtype: str, out_dtype: str | None, bias: str) -> None:
    a = F32.astype(getattr(ml_dtypes, dtype, dtype))
    prepared = prepare("matmul", {"a": a, "b": a, "bias": [1, 2], "a_scale": None}, out_dtype=out_dtype)
    assert prepared.arrays["bias"].dtype == bias
    assert "a_scale" not in prepared.arrays


I8 = F32.astype(np.int8)


@pytest.mark.parametrize(
    ("op", "b", "bias", "dtype"),
    [
        # Scores are float32, whatever the items.
        ("search", I8, np.ones(2, np.float32), "float32"),
        ("search", I8, [1, 2], "float32"),
        # Only the server knows the dtype of the others.
        ("matmul", "@w", np.ones(2, np.int32), "int32"),
        ("matmul", "@w", np.ones(2, np.float16), "float16"),
        ("matmul", "@w", [1, 2], "float32"),
    ],
)
def test_the_dtype_of_a_bias(op: str, b: Any, bias: Any, dtype: str) -> None:
    prepared = prepare(op, {"a": b, "b": b, "bias": bias})
    assert prepared.arrays["bias"].dtype == dtype


class OtherLibrary:
    """An array of a library that this process's client has never heard of: DLPack, a device and a namespace, nothing else."""

    device: Any = "first"

    def __init__(self, tensor: torch.Tensor, device: int = 1) -> None:
        self.tensor = tensor
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.device_type = device

    def __dlpack__(self) -> Any:
        assert self.device_type == 1
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def get(self) -> OtherLibrary:
        return OtherLibrary(self.tensor)

    def __array_namespace__(self) -> Any:
        return OtherNamespace


class OtherNamespace:
    @staticmethod
    def asarray(array: np.ndarray[Any, Any], *, device: str = "") -> tuple[str, np.ndarray[Any, Any]]:
        return device, array


@pytest.mark.parametrize("device", [1, 2], ids=["host", "device"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(24, dtype=torch.int32).reshape(2, 3, 4).permute(2, 0, 1)[1:, :, ::2],
        torch.tensor(3.5, dtype=torch.float16),
        torch.ones(2, 0, 3),
        torch.tensor([True, False]),
        torch.arange(5).bfloat16(),
        torch.arange(5, dtype=torch.uint8)[2:],
    ],
    ids=str,
)
def test_dlpack_of_any_library(tensor: torch.Tensor, device: int) -> None:
    host = HostArray.of(OtherLibrary(tensor, device))
    assert host.dtype == str(tensor.dtype).removeprefix("torch.")
    np.testing.assert_array_equal(host.numpy().astype(np.float64), tensor.double().numpy())
    place, array = host.like(OtherLibrary(tensor))
    assert place == "first"
    np.testing.assert_array_equal(array.astype(np.float64), tensor.double().numpy())


class InParts(OtherLibrary):
    """As JAX's arrays that lie on several devices: NumPy gathers the parts."""

    # No method of JAX's arrays.
    get = property()

    def __dlpack_device__(self) -> tuple[int, int]:
        raise BufferError("only supported for unsharded arrays")

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.tensor.numpy()


def test_an_array_in_parts_on_several_devices() -> None:
    array = InParts(torch.arange(6.0).reshape(2, 3))
    prepared = prepare("add", {"a": array, "b": 1})
    assert prepared.arrays["a"].data.tolist() == [[0, 1, 2], [3, 4, 5]]
    place, answer = prepared.arrays["a"].like(prepared.like)
    assert place == "", "the parts of an answer are its library's affair"
    assert answer.tolist() == [[0, 1, 2], [3, 4, 5]]


class Noted:
    """A context that notes in which thread it is entered and left."""

    id = 0

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __enter__(self) -> None:
        self.threads.append(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self.threads.append(threading.get_ident())


class CupyArray(OtherLibrary):
    """As CuPy's: it has no namespace of its own, and new arrays lie on the device of the context."""

    __array_namespace__ = property()

    def __init__(self, tensor: torch.Tensor, device: Noted) -> None:
        super().__init__(tensor)
        self.device = device


def test_the_answer_to_an_array_of_cupy_lies_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current, other = Noted(), Noted()

    def asarray(array: np.ndarray[Any, Any]) -> CupyArray:
        return CupyArray(torch.from_numpy(array), other if len(other.threads) % 2 else current)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=CupyArray, asarray=asarray))
    prepared = prepare("add", {"a": CupyArray(torch.arange(3.0), other), "b": 1})
    answer = prepared.arrays["a"].like(prepared.like)
    assert isinstance(answer, CupyArray)
    assert answer.tensor.tolist() == [0, 1, 2]
    assert answer.device is other


def test_another_thread_uses_the_device_and_stream_of_cupys_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch, CuPy has them by thread: another stream would read what is not computed yet."""
    device, streams = Noted(), {threading.get_ident(): Noted()}

    class Array:
        def __init__(self) -> None:
            self.device = device

    def get_current_stream(_device_id: int) -> Noted:
        return streams[threading.get_ident()]

    cupy = SimpleNamespace(ndarray=Array, cuda=SimpleNamespace(get_current_stream=get_current_stream))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    work = as_here(threading.get_ident, [np.ones(2), Array()])
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(work).result()
    assert other != threading.get_ident()
    assert device.threads == streams[threading.get_ident()].threads == [other, other]


class Column:
    """As Arrow's arrays: DLPack, and neither a dtype nor a namespace to make another of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self) -> Any:
        return self.tensor.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_dlpack_alone_is_answered_with_numpy_arrays() -> None:
    prepared = prepare("add", {"a": Column(torch.arange(3.0)), "b": 1})
    assert prepared.arrays["a"].data.tolist() == [0, 1, 2]
    assert isinstance(prepared.arrays["a"].like(prepared.like), np.ndarray)
    prepared = prepare_inputs({"x": Column(torch.arange(3.0)), "y": torch.ones(3)}, {})
    assert isinstance(prepared.arrays["x"].like(prepared.like), torch.Tensor)


def test_dlpack_memory_outlives_its_array() -> None:
    host = HostArray.of(torch.full((1000,), 7.0))
    junk = [torch.zeros(1000) for _ in range(100)]
    assert host.data.sum() == 7000
    assert len(junk) == 100


def test_dlpack_is_a_view() -> None:
    tensor = torch.zeros(4)
    host = HostArray.of(tensor)
    tensor[1] = 5
    assert host.data.tolist() == [0, 5, 0, 0]


class Traced:
    """As JAX's arrays inside of `jit`: a type and no elements, and half of DLPack."""

    def __dlpack__(self) -> Any:
        raise AssertionError("it has no elements")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("a traced array has no elements; move the call out of jit")


def test_a_traced_array_is_refused_in_the_words_of_its_library() -> None:
    with pytest.raises(TypeError, match=r"x: .*out of jit"):
        prepare("softmax", {"x": Traced()})


def test_torch_negates_before_the_elements_are_read() -> None:
    lazy = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert lazy.is_neg()
    assert HostArray.of(lazy).data.tolist() == [-2, -4]


class Image(torch.Tensor):
    """A tensor of a class of its own, as torchvision and others have them."""


def test_tensors_of_a_class_of_ones_own() -> None:
    lazy = torch.tensor([1 + 2j, 3 + 4j]).conj().imag.as_subclass(Image)
    assert lazy.is_neg()
    assert HostArray.of(lazy).data.tolist() == [-2, -4]
    narrow = HostArray.of(torch.ones(2, dtype=torch.float8_e5m2).as_subclass(Image))
    assert narrow.dtype == "float8_e5m2"
    answer = narrow.like(lazy)
    assert isinstance(answer, torch.Tensor)
    assert answer.dtype == torch.float8_e5m2


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, 2).to_mkldnn(),
        torch._efficientzerotensor((2, 2)),
        [torch.ones(2, requires_grad=True)],
    ],
    ids=["sparse", "opaque", "no memory", "list"],
)
def test_tensors_that_cannot_be_read_are_named(value: object) -> None:
    with pytest.raises(TypeError, match=r"^x: "):
        prepare("softmax", {"x": value})


def test_complex_numbers_of_torch() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        HostArray.of(torch.ones(2, dtype=torch.complex64))
