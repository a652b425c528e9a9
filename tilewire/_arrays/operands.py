"""Turns a user's operands into arrays and names of resident tensors: dtypes by NumPy's rules, vectors by `np.matmul`'s.

Rules of dtypes, in order:
- Arrays have the dtype that they have; a Python number or a list takes that of the arrays beside it.
- Arrays of several dtypes are converted to the one that holds all of them, as NumPy 2 promotes.
- Without an array, lists and numbers are float32, as JSON bodies are.
- A dtype that the op does not take, as float64 for `matmul`, is converted to the client's `cast`.
- Without `cast` it is an error before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewire._arrays.dlpack import can_answer, is_foreign
from tilewire._arrays.dtypes import CODES, DTYPES, EXTENSIONS, FLOATS, promote, promote_number
from tilewire._arrays.host import HostArray, refuse_unreadable
from tilewire._arrays.lists import first_lists, read_numbers
from tilewire._names import tensor_name
from tilewire._types import Resident, TensorInfo

# Dtype of lists and numbers that stand alone.
DEFAULT_DTYPE = "float32"
# Input that some functions have and others do not.
_SECOND = "y"
# Inputs whose dtype is not that of the others.
_SCALES = ("a_scale", "b_scale")
OPTIONAL_OPERANDS = ("bias", "weight", *_SCALES)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Operands that are ready to be sent.

    Attributes:
        arrays: Arrays by input name.
        residents: Names of resident tensors by input name, without the `@`.
        like: First array of a library other than NumPy, for the answer to be of the same; None without one.
        squeezed: Axes of the output that vectors did not have.
        dropped: Options that mean nothing for a vector.
    """

    arrays: Mapping[str, HostArray]
    residents: Mapping[str, str]
    like: Any = None
    squeezed: tuple[int, ...] = ()
    dropped: tuple[str, ...] = ()


class DtypeNotTaken(TypeError):
    """An array of a dtype that an op does not take, and that a cast would mend.

    Args:
        problem: The input and its dtype.
        conversion: Python that converts it.
        taken: What is taken instead, or nothing to say.
    """

    def __init__(self, problem: str, conversion: str, taken: str = "") -> None:
        super().__init__(problem, conversion, taken)
        self._problem = problem
        self._conversion = conversion
        self._taken = taken

    def __str__(self) -> str:
        return self.saying(f'type {self._conversion}, or give the client cast="float32"')

    def saying(self, remedy: str) -> str:
        """Returns the message with what helps where the caller writes no Python."""
        return "; ".join(part for part in (self._problem, remedy, self._taken) if part)


@dataclass(slots=True)
class _Given:
    """One operand as it was given: an array, a list or number without a dtype of its own, or a resident."""

    name: str
    value: Any
    array: HostArray | None = None
    resident: str | None = None
    dtype: str | None = None


def prepare(op: str, operands: Mapping[str, Any], *, cast: str | None = None, out_dtype: str | None = None) -> Prepared:
    """Applies the rules of this module.

    Args:
        op: Name of the op.
        operands: By input name; None for those that are not given.
        cast: Dtype for arrays of a dtype that the op does not take; None makes them an error.
        out_dtype: Requested dtype of the result.

    Raises:
        TypeError: A dtype that cannot be sent; the message says what to type.
        ValueError: A resident's name that cannot be, or a number where `matmul` needs vectors.
    """
    for name, value in operands.items():
        if value is None and op in DTYPES and name not in (*OPTIONAL_OPERANDS, _SECOND):
            raise TypeError(f"{name}: expected an array, a list, a number, or the name of a resident tensor; got None")
    given = [_given(name, value) for name, value in operands.items() if value is not None]
    main = [operand for operand in given if operand.name not in OPTIONAL_OPERANDS]
    common = _common(op, main, cast)
    for operand in main:
        _convert(operand, common, main)
    is_known = any(operand.dtype is not None or operand.resident is None for operand in main)
    for operand in given:
        if operand.name in OPTIONAL_OPERANDS and operand.resident is None:
            if op == "search":
                refuse_filter(operand.name, operand.array or _leaves_of(operand))
            taken, usual = dtypes_beside(operand.name, op, common if is_known else None, out_dtype)
            _convert_secondary(operand, taken, usual, cast)
    arrays = {operand.name: operand.array for operand in given if operand.array is not None}
    residents = {operand.name: operand.resident for operand in given if operand.resident is not None}
    like = next((operand.value for operand in given if can_answer(operand.value)), None)
    squeezed, dropped = _as_matrices(arrays, main) if op == "matmul" else ((), ())
    return Prepared(arrays, residents, like, squeezed, dropped)


def prepare_inputs(operands: Mapping[str, Any], dtypes: Mapping[str, str], cast: str | None = None) -> Prepared:
    """Prepares the inputs of a program, each by itself.

    Args:
        operands: By input name.
        dtypes: Declared dtypes by input name, as far as they are known; lists and numbers take them.
        cast: Dtype for arrays of another dtype than the declared; None leaves them to the server.

    Raises:
        TypeError: No operands by name, or one that cannot be sent.
    """
    if not isinstance(operands, Mapping):
        raise TypeError(f"inputs: expected operands by name, as {{'x': x}}; got {type(operands).__name__}")
    given = [_given(name, value) for name, value in operands.items() if value is not None]
    for operand in given:
        dtype = operand.dtype or dtypes.get(operand.name, DEFAULT_DTYPE)
        is_other = operand.array is not None and dtype != dtypes.get(operand.name, dtype)
        _convert(operand, cast if is_other and cast is not None else dtype, given)
    return Prepared(
        arrays={operand.name: operand.array for operand in given if operand.array is not None},
        residents={operand.name: operand.resident for operand in given if operand.resident is not None},
        like=next((operand.value for operand in given if can_answer(operand.value)), None),
    )


def _given(name: str, value: Any) -> _Given:
    if isinstance(value, str):
        if not value.startswith("@"):
            raise TypeError(f"{name}: {value[:64]!r} is neither an array nor the name of a resident tensor, '@…'")
        return _Given(name, value, resident=tensor_name(value, name))
    if isinstance(value, TensorInfo | Resident):
        info = value if isinstance(value, TensorInfo) else value.described
        # A dtype that only a newer server knows is left to it, as one that is not known here.
        dtype = info.dtype if info is not None and info.dtype in CODES else None
        return _Given(name, value, resident=tensor_name(value.name), dtype=dtype)
    try:
        refuse_unreadable(value)
        if is_weak(value):
            return _Given(name, value)
        array = HostArray.of(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: {error}") from error
    return _Given(name, value, array=array, dtype=array.dtype)


def is_weak(value: Any) -> bool:
    """Whether a value has no dtype of its own: Python numbers, and lists of them."""
    for rows in first_lists(value):
        if not rows:
            return True
        value = rows[0]
    return isinstance(value, bool | int | float) and not isinstance(value, np.generic)


def dtypes_of(op: str) -> tuple[str, ...]:
    """Returns the dtypes that an op takes; every dtype for an op that this client lacks."""
    return DTYPES.get(op, tuple(CODES))


def _common(op: str, main: list[_Given], cast: str | None) -> str:
    typed = [operand.dtype for operand in main if operand.dtype is not None]
    common = promote(typed) if typed else DEFAULT_DTYPE
    if typed:
        for operand in main:
            if operand.dtype is None and operand.resident is None:
                common = _promote_weak(operand, common)
    taken = dtypes_of(op)
    if common in taken:
        return common
    blamed = next((operand for operand in main if operand.dtype not in (None, *taken)), main[0])
    rest = f"{op} takes {', '.join(taken)}"
    if blamed.resident is not None and blamed.dtype not in (None, *taken):
        raise TypeError(f"{blamed.name}: {op} does not take {blamed.dtype}, as @{blamed.resident} is; {rest}")
    if cast is not None:
        return cast
    made = "" if blamed.dtype in (None, common) else f", which {blamed.dtype} becomes beside the other"
    raise DtypeNotTaken(f"{blamed.name}: {op} does not take {common}{made}", _conversion(blamed), rest)


def _promote_weak(operand: _Given, common: str) -> str:
    leaves = _leaves_of(operand)
    if leaves.dtype == object:
        raise TypeError(f"{operand.name}: a number of more than 64 bits fits no dtype")
    return promote_number(common, leaves.dtype.type(1).item())


def _leaves_of(operand: _Given) -> np.ndarray[Any, Any]:
    """Returns the numbers of a list; NumPy would read texts among them, and None as NaN."""
    try:
        leaves = read_numbers(operand.value)
    except ValueError as error:
        raise TypeError(f"{operand.name}: a list of lists of unequal lengths is no array") from error
    wrong = [leaf for leaf in leaves.flat if not isinstance(leaf, int | float)] if leaves.dtype == object else []
    if wrong or leaves.dtype.kind not in "biufO":
        what = repr(wrong[0]) if wrong else "a text or a complex number"
        raise TypeError(f"{operand.name}: a list has numbers only, but this one holds {what}")
    return leaves


def _conversion(operand: _Given) -> str:
    if is_foreign(operand.value) and hasattr(operand.value, "float"):
        return f"{operand.name}.float()"
    return f"{operand.name}.astype(np.float32)"


def _convert(operand: _Given, dtype: str, main: list[_Given]) -> None:
    if operand.resident is not None:
        if operand.dtype not in (None, dtype):
            beside = next(other.name for other in main if other is not operand and other.dtype != operand.dtype)
            raise TypeError(
                f"{operand.name}: @{operand.resident} is {operand.dtype} and cannot become {dtype} on its way; "
                f"type {beside}.astype({_numpy_spelling(str(operand.dtype))}), or store it as {dtype}"
            )
        return
    operand.array = _array_of(operand, dtype)


def _numpy_spelling(name: str) -> str:
    return f"ml_dtypes.{name}" if name in EXTENSIONS else f"np.{name}"


def _array_of(operand: _Given, dtype: str) -> HostArray:
    if operand.array is not None:
        return operand.array.astype(dtype)
    if dtype not in CODES:
        raise TypeError(f"{operand.name}: {dtype} is none of the dtypes that this client knows: {', '.join(CODES)}")
    leaves = _leaves_of(operand)
    if dtype in EXTENSIONS:
        return HostArray(DEFAULT_DTYPE, read_numbers(operand.value, np.dtype(np.float32))).astype(dtype)
    try:
        array = read_numbers(operand.value, np.dtype(dtype))
    except (ValueError, OverflowError) as error:
        raise TypeError(f"{operand.name}: {error}") from error
    if array.dtype.kind == "i" and leaves.dtype.kind == "f" and not np.array_equal(array, leaves):
        raise TypeError(f"{operand.name}: holds a fraction; {dtype} takes whole numbers")
    return HostArray(dtype, array)


def dtypes_beside(name: str, op: str, common: str | None, out_dtype: str | None) -> tuple[tuple[str, ...], str]:
    """Returns the dtypes of an input that need not have that of the others, and the one that lists and numbers get.

    Args:
        name: Name of the input.
        op: Name of the op.
        common: Dtype of the other inputs; None where only the server knows it, which then checks.
        out_dtype: Requested dtype of the result.
    """
    if name in _SCALES:
        return ("float32",), "float32"
    if common is None:
        return (*FLOATS, "int32"), DEFAULT_DTYPE
    if op == "matmul" and common == "int8" and out_dtype in (None, "int32"):
        return ("int32",), "int32"
    return FLOATS, common if common in FLOATS else DEFAULT_DTYPE


def refuse_filter(name: str, array: HostArray | np.ndarray[Any, Any]) -> None:
    """Refuses a filter where numbers are added to scores: as 1 and 0 it would change them and exclude nothing.

    Raises:
        TypeError: Booleans; the message says what to type.
    """
    if array.dtype == "bool":
        raise TypeError(
            f"{name}: booleans exclude no item; where True is to keep one, type "
            f"np.where({name}, 0, -np.inf).astype(np.float32), with np.inf for l2"
        )


def _convert_secondary(operand: _Given, taken: tuple[str, ...], usual: str, cast: str | None) -> None:
    dtype = operand.dtype or usual
    if dtype not in taken:
        if cast is None:
            problem = f"{operand.name}: {dtype} is not taken here"
            raise DtypeNotTaken(problem, f"{operand.name}.astype(np.{usual})")
        dtype = usual
    operand.array = _array_of(operand, dtype)


def _as_matrices(arrays: dict[str, HostArray], main: list[_Given]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Makes matrices of vectors in place; returns the axes to squeeze and the transpositions to drop."""
    squeezed: list[int] = []
    dropped: list[str] = []
    for operand, axis in zip(main, (-2, -1), strict=False):
        array = arrays.get(operand.name)
        if array is None:
            _check_resident_matrix(operand)
            continue
        if not array.shape:
            raise ValueError(f"{operand.name}: matmul takes no single number; multiply with * or pointwise")
        if len(array.shape) == 1:
            data = array.data[None, :] if axis == -2 else array.data[:, None]
            arrays[operand.name] = HostArray(array.dtype, data)
            squeezed.append(axis)
            dropped.append(f"transpose_{operand.name}")
    return tuple(squeezed), tuple(dropped)


def _check_resident_matrix(operand: _Given) -> None:
    info = operand.value.described if isinstance(operand.value, Resident) else operand.value
    if isinstance(info, TensorInfo) and len(info.shape) < 2:
        raise ValueError(
            f"{operand.name}: @{operand.resident} is a vector; resident operands of matmul are matrices: "
            f"store it with a second dimension"
        )
