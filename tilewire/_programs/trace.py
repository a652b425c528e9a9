"""Records NumPy-like code as a program: stand-ins for arrays, whose operators write down steps. Computes nothing."""

from __future__ import annotations

import functools
import hashlib
import inspect
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import count
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np

from tilewire._arrays.dtypes import DTYPES, OUTPUTS, dtype_name
from tilewire._arrays.host import HostArray
from tilewire._arrays.operands import DEFAULT_DTYPE, OPTIONAL_OPERANDS, dtypes_beside, refuse_filter
from tilewire._clients.requests import Rules
from tilewire._clients.tensors import TensorCalls
from tilewire._names import tensor_name
from tilewire._options import (
    Activation,
    BinaryFunction,
    Metric,
    NormalizeKind,
    PointwiseFunction,
    Precision,
    ReduceKind,
    UnaryFunction,
)
from tilewire._programs.program import MAX_STEPS, InputSpec, Program, Step
from tilewire._transport import wire
from tilewire._types import Answer, Resident, TensorInfo, TopK

_UNARY: dict[Any, PointwiseFunction] = {
    np.exp: "exp",
    np.log: "log",
    np.sqrt: "sqrt",
    np.absolute: "abs",
    np.negative: "neg",
    np.tanh: "tanh",
}
_BINARY: dict[Any, PointwiseFunction] = {np.maximum: "maximum", np.minimum: "minimum"}
_OPERATORS: dict[Any, str] = {
    np.matmul: "__matmul__",
    np.add: "__add__",
    np.subtract: "__sub__",
    np.multiply: "__mul__",
    np.true_divide: "__truediv__",
    np.power: "__pow__",
}
_REDUCTIONS: dict[Any, ReduceKind] = {
    np.sum: "sum",
    np.mean: "mean",
    np.max: "max",
    np.min: "min",
    np.argmax: "argmax",
    np.argmin: "argmin",
    np.linalg.norm: "norm",
}
_DIGEST_BYTES = 8
_CONSTANT = re.compile(rf"c[0-9]+-[0-9a-f]{{{2 * _DIGEST_BYTES}}}")
# Functions that have methods, besides those that are written out: `x.exp()`, `x.mul(y)`.
_FUNCTIONS = (*get_args(UnaryFunction), *get_args(BinaryFunction))
# Functions that a product applies by itself.
_FUSED = ("relu", "gelu", "silu", "sigmoid", "tanh")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Result of a recording.

    Attributes:
        program: The program.
        constants: Arrays that the code referred to, by the resident's name.
    """

    program: Program
    constants: Mapping[str, HostArray]


def record(function: Callable[..., Any], inputs: Mapping[str, InputSpec | tuple[Any, Any]], name: str) -> Recorded:
    """Calls a function with stand-ins and returns the steps that it took.

    Args:
        function: Takes each input by name.
        inputs: Dtype and shape by name.
        name: Prefix of the constants' names.

    Raises:
        TypeError: A missing argument, one that has no name, or code that no op computes.
        ValueError: More steps than a program may have, or a name of a result that is another value's.
    """
    recorder = _Recorder(name, inputs)
    specs = {key: _spec(key, given) for key, given in inputs.items()}
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise TypeError(
            f"{name}: a built-in function without names for its inputs; trace a function that calls it, "
            f"as lambda {', '.join(inputs) or 'x'}: …, and give name={name!r}"
        ) from None
    _refuse_positional(signature, name)
    try:
        signature.bind(**specs)
    except TypeError as error:
        raise TypeError(f'{name}: {error}; give each argument its type, as x=("float32", (-1, 768))') from error
    result = function(**{key: Traced(recorder, key, spec.dtype) for key, spec in specs.items()})
    results = _results(result, name)
    if any(value._recorder is not recorder for value in results.values()):
        raise TypeError(f"{name}: returns a value of another recording")
    if not recorder.steps:
        raise TypeError(f"{name}: returns its inputs as they are; a program has at least one step")
    steps = _fuse(recorder.steps, tuple(value.name for value in results.values()))
    if len(steps) > MAX_STEPS:
        raise ValueError(f"{name}: {len(steps)} steps; a program has at most {MAX_STEPS}")
    names = _names(results, specs, steps, f"{name}: " if isinstance(result, Mapping) else None)
    outputs = tuple(names.get(value.name, value.name) for value in results.values())
    return Recorded(Program(specs, tuple(_renamed(step, names) for step in steps), outputs), recorder.constants)


def _refuse_positional(signature: inspect.Signature, name: str) -> None:
    parameters = [one for one in signature.parameters.values() if one.default is one.empty]
    unnamed = ", ".join(one.name for one in parameters if one.kind is one.POSITIONAL_ONLY)
    if unnamed:
        raise TypeError(
            f"{name}: inputs have names, but {unnamed} can be given by position only; take the / out of its signature, "
            f"or trace a function that calls it, as lambda {unnamed}: …, and give name={name!r}"
        )


class _Recorder:
    """The steps and constants so far."""

    def __init__(self, name: str, inputs: Collection[str]) -> None:
        self.name = name
        self._inputs = inputs
        self.steps: list[Step] = []
        self.constants: dict[str, HostArray] = {}
        self._known: dict[int, tuple[Any, str]] = {}

    def step(self, op: str, inputs: Mapping[str, Any], dtype: str | None, **options: Any) -> Traced:
        """Writes down an op with one output."""
        (value,) = self.record_op(op, inputs, dtype, **options).values()
        return value

    def record_op(self, op: str, inputs: Mapping[str, Any], dtype: str | None, **options: Any) -> dict[str, Traced]:
        """Writes down an op; its values are named after the step's number.

        Returns:
            The values by output name, each of the dtype that `OUTPUTS` gives it, else of `dtype`.
        """
        like = next(value.dtype for value in inputs.values() if isinstance(value, Traced))
        out_dtype = options.get("out_dtype")
        named = {
            key: self._name_of(key, value, op, like, out_dtype) for key, value in inputs.items() if value is not None
        }
        outputs = OUTPUTS.get(op, {"out": None})
        # A sole output is called "v", for value, in the program.
        stems = outputs if len(outputs) > 1 else ("v",)
        names = tuple(self._fresh(f"{stem}{len(self.steps)}") for stem in stems)
        kept = {key: value for key, value in options.items() if value is not None}
        self.steps.append(Step(op, named, names, kept))
        return {
            output: Traced(self, name, own or dtype) for name, (output, own) in zip(names, outputs.items(), strict=True)
        }

    def _fresh(self, name: str) -> str:
        return self._fresh(f"{name}_") if name in self._inputs else name

    def _name_of(self, key: str, value: Any, op: str, like: str | None, out_dtype: str | None) -> str:
        if isinstance(value, Traced):
            if value._recorder is not self:
                raise TypeError(f"{key}: a value of another recording; give each program its inputs by name")
            return value.name
        if isinstance(value, Resident | TensorInfo):
            return f"@{tensor_name(value.name)}"
        if isinstance(value, str):
            return f"@{tensor_name(value, key)}"
        try:
            array = HostArray.of(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"{key}: {error}") from error
        if key not in OPTIONAL_OPERANDS:
            return self._constant(value, _converted(key, array, like or DEFAULT_DTYPE))
        if op == "search":
            refuse_filter(key, array)
        taken, usual = dtypes_beside(key, op, like, out_dtype)
        is_taken = array.dtype in taken and not isinstance(value, list | tuple)
        return self._constant(value, array if is_taken else _converted(key, array, usual))

    def _constant(self, value: Any, array: HostArray) -> str:
        """Keeps the elements that a value has now: the code may change them later."""
        _, known = self._known.get(id(value), (None, ""))
        digest = _digest(array)
        if not known.endswith(f"-{digest}"):
            known = f"{self.name}/c{len(self.constants)}-{digest}"
            self.constants[known] = HostArray(array.dtype, array.data.copy())
            # With the value itself: an id is another's once its object is gone.
            self._known[id(value)] = (value, known)
        return f"@{known}"


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name that a function gives its program.

    Raises:
        TypeError: It has none.
    """
    name: str = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        raise TypeError(f'name: {function!r} has no name of its own; give name="…"')
    return name


def constants_of(program: Program, name: str) -> set[str]:
    """Returns the residents of a program that `trace` uploaded for it, by their names."""
    read = {value for step in program.steps for value in step.inputs.values() if value.startswith(f"@{name}/")}
    return {value[1:] for value in read if _CONSTANT.fullmatch(value[len(name) + 2 :])}


def _digest(array: HostArray) -> str:
    digest = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=_DIGEST_BYTES)
    digest.update(np.ascontiguousarray(array.data).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _converted(key: str, array: HostArray, dtype: str) -> HostArray:
    converted = array.astype(dtype)
    if "int" in dtype and ("float" in array.dtype or not np.array_equal(converted.data, array.data)):
        raise TypeError(f"{key}: a constant of {array.dtype} cannot become {dtype}, the dtype of the value beside it")
    return converted


def _dtype_of_product(dtype: str | None) -> str | None:
    return {"int8": "int32"}.get(dtype or "", "bfloat16" if "float8" in str(dtype) else dtype)


class _RecordedCalls(TensorCalls):
    """The client's methods of ops, each of which writes down a step."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__(Rules())
        self._recorder = recorder

    def _send(self, call: wire.Call) -> wire.Reply:
        raise AssertionError("This is a bug: nothing is sent while code is recorded.")

    def run(self, op: str, operands: Mapping[str, Any], *, store: str | None = None, **options: Any) -> Answer:
        if store is not None:
            raise TypeError("store: a step of a program stores nothing; run the program, and put what it gives")
        inputs = {**operands, **{name: options.pop(name) for name in OPTIONAL_OPERANDS if name in options}}
        dtype = next(value.dtype for value in inputs.values() if isinstance(value, Traced))
        if options.get("out_dtype") is not None:
            dtype = options["out_dtype"] = dtype_name(options["out_dtype"], "out_dtype")
        return Answer(self._recorder.record_op(op, inputs, dtype, **options), None, None, None, {})


class Traced:
    """A stand-in for an array while code is recorded.

    An op that has no method here has the client's, with this value as the first operand: `x.add(y, alpha=2)`. A function
    of `pointwise` has one, too: `x.exp()`, `x.maximum(y)`.

    Attributes:
        name: Name of the value in the program.
        dtype: Name of its dtype, as far as it is known.
    """

    __slots__ = ("_recorder", "dtype", "name")

    def __init__(self, recorder: _Recorder, name: str, dtype: str | None) -> None:
        self._recorder = recorder
        self.name = name
        self.dtype = dtype

    def matmul(
        self,
        other: Any,
        *,
        bias: Any = None,
        activation: Activation | None = None,
        transpose_b: bool | None = None,
        out_dtype: Any = None,
        precision: Precision | None = None,
    ) -> Traced:
        """Records activation(self @ other + bias)."""
        asked = None if out_dtype is None else dtype_name(out_dtype, "out_dtype")
        dtype = asked or _dtype_of_product(self.dtype)
        inputs = {"a": self, "b": other, "bias": bias}
        options = {"activation": activation, "transpose_b": transpose_b, "out_dtype": asked, "precision": precision}
        return self._recorder.step("matmul", inputs, dtype, **options)

    def softmax(self, axis: int = -1, *, log: bool | None = None) -> Traced:
        """Records softmax or log-softmax along one axis."""
        return self._recorder.step("softmax", {"x": self}, self.dtype, axis=_axis(axis), log=log)

    def topk(self, k: int, axis: int = -1, *, largest: bool | None = None) -> TopK[Traced]:
        """Records the k largest or smallest elements: values and indices."""
        asked = {"k": operator.index(k), "axis": _axis(axis), "largest": largest}
        return TopK(**self._recorder.record_op("topk", {"x": self}, self.dtype, **asked))

    def search(self, items: Any, k: int = 10, *, bias: Any = None, metric: Metric | None = None) -> TopK[Traced]:
        """Records the k best items of each row: values and indices."""
        inputs = {"a": self, "b": items, "bias": bias}
        return TopK(**self._recorder.record_op("search", inputs, None, k=k, metric=metric))

    def normalize(
        self,
        kind: NormalizeKind,
        *,
        weight: Any = None,
        bias: Any = None,
        axis: int | None = None,
        eps: float | None = None,
    ) -> Traced:
        """Records layer norm, RMS norm or the division by the 2-norm."""
        inputs = {"x": self, "weight": weight, "bias": bias}
        where = None if axis is None else _axis(axis)
        return self._recorder.step("normalize", inputs, self.dtype, kind=kind, axis=where, eps=eps)

    def reduce(
        self, kind: ReduceKind, axis: int | Literal["all"] | None = None, *, keepdims: bool | None = None
    ) -> Traced:
        """Records a reduction; every axis where `axis` is None, as in NumPy."""
        dtype = "int64" if kind in ("argmax", "argmin") else self.dtype
        where = "all" if axis is None or axis == "all" else _axis(axis)
        keepdims = None if keepdims is None else bool(keepdims)
        return self._recorder.step("reduce", {"x": self}, dtype, kind=kind, axis=where, keepdims=keepdims)

    def pointwise(
        self, fn: PointwiseFunction, other: Any = None, *, scale: float | None = None, shift: float | None = None
    ) -> Traced:
        """Records fn(self) or fn(self, other), times `scale` plus `shift`."""
        inputs = {"x": self, "y": other}
        return self._recorder.step("pointwise", inputs, self.dtype, fn=fn, scale=scale, shift=shift)

    def sum(self, axis: int | None = None, *, keepdims: bool | None = None) -> Traced:
        """Records the sum."""
        return self.reduce("sum", axis, keepdims=keepdims)

    def mean(self, axis: int | None = None, *, keepdims: bool | None = None) -> Traced:
        """Records the mean."""
        return self.reduce("mean", axis, keepdims=keepdims)

    def max(self, axis: int | None = None, *, keepdims: bool | None = None) -> Traced:
        """Records the largest element."""
        return self.reduce("max", axis, keepdims=keepdims)

    def min(self, axis: int | None = None, *, keepdims: bool | None = None) -> Traced:
        """Records the smallest element."""
        return self.reduce("min", axis, keepdims=keepdims)

    def argmax(self, axis: int | None = None) -> Traced:
        """Records the index of the largest element."""
        return self.reduce("argmax", axis)

    def argmin(self, axis: int | None = None) -> Traced:
        """Records the index of the smallest element."""
        return self.reduce("argmin", axis)

    def relu(self) -> Traced:
        """Records max(self, 0)."""
        return self.pointwise("relu")

    def gelu(self) -> Traced:
        """Records GELU, in its tanh form."""
        return self.pointwise("gelu")

    def silu(self) -> Traced:
        """Records self · sigmoid(self)."""
        return self.pointwise("silu")

    def sigmoid(self) -> Traced:
        """Records the logistic function."""
        return self.pointwise("sigmoid")

    def __matmul__(self, other: Any) -> Traced:
        return self.matmul(other)

    def __rmatmul__(self, other: Any) -> Traced:
        return self._recorder.step("matmul", {"a": other, "b": self}, _dtype_of_product(self.dtype))

    def __add__(self, other: Any) -> Traced:
        if isinstance(other, Real) and self._is_scaled:
            return self._affine(1.0, float(other))
        return self._recorder.step("add", {"a": self, "b": other}, self.dtype)

    def __radd__(self, other: Any) -> Traced:
        return self.__add__(other)

    def __sub__(self, other: Any) -> Traced:
        if isinstance(other, Real) and self._is_scaled:
            return self._affine(1.0, -float(other))
        return self._recorder.step("add", {"a": self, "b": other}, self.dtype, alpha=-1)

    def __rsub__(self, other: Any) -> Traced:
        if isinstance(other, Real) and self._is_scaled:
            return self._affine(-1.0, float(other))
        return self._recorder.step("add", {"a": other, "b": self}, self.dtype, alpha=-1)

    def __mul__(self, other: Any) -> Traced:
        if isinstance(other, Real):
            return self._affine(float(other), 0.0)
        return self.pointwise("mul", other)

    def __rmul__(self, other: Any) -> Traced:
        return self.__mul__(other)

    def __truediv__(self, other: Any) -> Traced:
        if isinstance(other, Real) and other != 0:
            return self._affine(1.0 / float(other), 0.0)
        return self.pointwise("div", other)

    def __rtruediv__(self, other: Any) -> Traced:
        return self._recorder.step("pointwise", {"x": other, "y": self}, self.dtype, fn="div")

    def __pow__(self, exponent: Any) -> Traced:
        power = float(exponent) if isinstance(exponent, Real) else None
        if power == 2:
            return self.pointwise("mul", self)
        if power in (0.5, -0.5):
            return self.pointwise("sqrt" if power == 0.5 else "rsqrt")
        raise TypeError(f"no op computes the power {exponent!r} in a program; those of 2, 0.5 and -0.5 are computed")

    def __rpow__(self, base: Any) -> NoReturn:
        raise TypeError(f"no op computes a power of {base!r} in a program; np.exp is computed")

    def __neg__(self) -> Traced:
        return self.pointwise("neg")

    def __abs__(self) -> Traced:
        return self.pointwise("abs")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name in _FUNCTIONS:
                return functools.partial(self.pointwise, name)
            if name not in DTYPES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return functools.partial(getattr(_RecordedCalls(self._recorder), name), self)

    def __bool__(self) -> bool:
        raise TypeError("a value that is being recorded has no elements yet: if and while cannot look at it")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("no op compares values in a program")

    __ne__ = __eq__
    __hash__ = object.__hash__

    def __len__(self) -> int:
        raise TypeError("a value that is being recorded has no elements yet: it has no length and cannot be iterated")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and not options:
            if ufunc in _UNARY:
                return self.pointwise(_UNARY[ufunc])
            if ufunc is np.square:
                return self**2
            if ufunc in _BINARY and isinstance(inputs[0], Traced):
                return self._extremum(_BINARY[ufunc], inputs[1])
            if ufunc in _BINARY:
                return self._extremum(_BINARY[ufunc], inputs[0])
            if ufunc in _OPERATORS:
                method = _OPERATORS[ufunc]
                if isinstance(inputs[0], Traced):
                    return getattr(inputs[0], method)(inputs[1])
                return getattr(self, method.replace("__", "__r", 1))(inputs[0])
        raise TypeError(f"no op computes np.{ufunc.__name__} with these arguments in a program")

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function in _REDUCTIONS:
            return _reduction(function, *args, **options)
        if function is np.clip:
            return _clipped(*args, **options)
        raise TypeError(f"no op computes np.{function.__name__} in a program")

    @property
    def _is_scaled(self) -> bool:
        """Whether numbers are added by `pointwise`. It takes no integers and no float64: for those they are constants."""
        return self.dtype is None or self.dtype in DTYPES["pointwise"]

    def _affine(self, scale: float, shift: float) -> Traced:
        # The one function whose inverse is exact: fn · scale + shift with fn = -x.
        return self.pointwise("neg", scale=-scale, shift=shift or None)

    def _extremum(self, fn: PointwiseFunction, other: Any) -> Traced:
        if isinstance(other, Real):
            if fn == "maximum" and other == 0:
                return self.pointwise("relu")
            other = float(other)
        return self.pointwise(fn, other)


def _axis(axis: Any) -> int:
    """Returns one axis as a number.

    Raises:
        TypeError: Several axes, or none.
    """
    try:
        return operator.index(axis)
    except TypeError:
        raise TypeError(f"axis: expected an integer, got {axis!r}; no op reads several axes") from None


def _reduction(function: Any, *args: Any, **options: Any) -> Traced:
    """Records a reduction of NumPy, whose arguments are bound by its own signature: the second of `norm` is no axis.

    Raises:
        TypeError: An argument that no op has.
    """
    signature = inspect.signature(function)
    (_, value), *rest = signature.bind(*args, **options).arguments.items()
    if not isinstance(value, Traced):
        raise TypeError(f"np.{function.__name__}: expected the recorded value as the first argument")
    given = {name: argument for name, argument in rest if argument is not signature.parameters[name].default}
    for name, argument in given.items():
        if name not in ("axis", "keepdims"):
            raise TypeError(f"np.{function.__name__}: no op computes {name}={argument!r} in a program")
    return value.reduce(_REDUCTIONS[function], **given)


def _clipped(*args: Any, **options: Any) -> Traced:
    """Records `np.clip`.

    Raises:
        TypeError: An argument that no op has.
    """
    given = inspect.signature(np.clip).bind(*args, **options).arguments
    value = given.pop("a")
    if not isinstance(value, Traced):
        raise TypeError("np.clip: expected the recorded value as the first argument")
    bounds: tuple[tuple[BinaryFunction, tuple[str, str]], ...]
    bounds = (("maximum", ("a_min", "min")), ("minimum", ("a_max", "max")))
    for fn, names in bounds:
        for bound in [given.pop(name, None) for name in names]:
            value = value if bound is None else value._extremum(fn, bound)
    for name, argument in given.items():
        raise TypeError(f"np.clip: no op computes {name}={argument!r} in a program")
    return value


def _spec(name: str, given: InputSpec | tuple[Any, Any]) -> InputSpec:
    if isinstance(given, InputSpec):
        return given
    try:
        dtype, shape = given
        sizes = tuple(operator.index(size) for size in shape)
    except (TypeError, ValueError):
        raise TypeError(f'{name}: expected dtype and shape, as {name}=("float32", (-1, 768))') from None
    return InputSpec(dtype_name(dtype, name), sizes)


def _results(result: Any, name: str) -> dict[str, Traced]:
    """Returns the recorded values that a function returned, by the name that each shall have."""
    results: dict[str, Any] = {"out": result}
    if isinstance(result, Mapping):
        results = dict(result)
    elif isinstance(result, TopK):
        results = result._asdict()
    elif isinstance(result, tuple | list):
        results = {value.name if isinstance(value, Traced) else "": value for value in result}
        if len(results) < len(result) and "" not in results:
            raise ValueError(f"{name}: returns one value twice")
    if not results or not all(isinstance(value, Traced) for value in results.values()):
        raise TypeError(f"{name}: expected it to return recorded values, one, a tuple or a dict of them")
    return results


def _names(
    results: Mapping[str, Traced], inputs: Mapping[str, InputSpec], steps: list[Step], wanted: str | None
) -> dict[str, str]:
    """Returns the new names of values, by their old ones.

    Args:
        results: Results by the name that each shall have.
        inputs: Inputs of the program.
        steps: Steps of the program.
        wanted: Beginning of an error's words where the user chose the names; None where a name that is taken is left out.
    """
    names: dict[str, str] = {}
    for new, value in results.items():
        why = ""
        if value.name in inputs:
            why = "" if new == value.name else f"the value is the input {value.name!r}"
        elif new in inputs:
            why = "it is an input's"
        elif value.name in names:
            why = f"the value is {names[value.name]!r} already"
        if not why:
            names[value.name] = new
        elif wanted is not None:
            raise ValueError(f"{wanted}{new!r} cannot be the name of a result: {why}")
    # What lies between gives way to a name that a user chose.
    taken = {*inputs, *names.values()}
    between = {name for step in steps for name in step.outputs} - names.keys()
    fresh = (name for number in count() if (name := f"v{number}") not in taken | between)
    return names | {name: next(fresh) for name in sorted(between & taken)}


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    inputs = {key: names.get(value, value) for key, value in step.inputs.items()}
    return replace(step, inputs=inputs, outputs=tuple(names.get(name, name) for name in step.outputs))


def _fuse(steps: list[Step], outputs: tuple[str, ...]) -> list[Step]:
    """Lets products apply the activation behind them, where nothing else reads what lies between."""
    kept: list[Step] = []
    for step in steps:
        fn = step.options.get("fn")
        source = step.inputs.get("x")
        index = next((i for i, other in enumerate(kept) if source in other.outputs), None)
        if step.op != "pointwise" or fn not in _FUSED or set(step.options) != {"fn"} or index is None:
            kept.append(step)
            continue
        readers = sum(source in other.inputs.values() for other in steps)
        product = kept[index]
        if product.op != "matmul" or readers != 1 or source in outputs or "activation" in product.options:
            kept.append(step)
            continue
        # Later: what it is given to stands behind it in any case.
        kept[index] = replace(product, outputs=step.outputs, options={**product.options, "activation": fn})
    return kept
