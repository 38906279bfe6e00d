"""nn.LSTM, nn.GRU and nn.RNN with packed weights, all of their layers and time steps in `torch.ops.xopt.recurrent`.

Everything that torch's forwards take works the same: packed sequences, the batch first or second or none, states given
or not. What cannot be computed so, and every call that torch refuses, goes to torch's own forward.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from xopt import ops  # noqa: F401 - loads them
from xopt.graph.symbol import CannotRecord, is_symbolic, recorder_of
from xopt.modules.base import (
    Context,
    Replacement,
    cast_parameter,
    derive,
    own_forward,
    plain_parameter_problem,
    result_dtype,
)
from xopt.modules.gradients import wants_gradient
from xopt.modules.packed_parameter import PackedParameter
from xopt.modules.packed_state import PackedState
from xopt.modules.pattern import step
from xopt.ops.fakes import FLOATING

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_recurrent = torch.ops.xopt.recurrent.default


class Recurrent(PackedState):
    """What layers and cells have in common. A mixin that stands before `Replacement` and the source class."""

    source: ClassVar[type[nn.Module]]
    switch: ClassVar[str] = "recurrent_prepack"
    packs: ClassVar[bool] = True
    on_cpu_only: ClassVar[bool] = True

    @classmethod
    def why_not(cls, module: Any, context: Context) -> str | None:
        if own_forward(module, cls.source):
            return "it has a forward of its own"
        problems = (plain_parameter_problem(module, name) for name in parameter_names(module))
        return next((problem for problem in problems if problem), None)

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        weights = [name for name in parameter_names(module) if name.startswith("weight_")]
        gates = GATES[cell_of(module)]
        packed = {name: _packed(module._parameters[name], _gates_of(name, gates), context) for name in weights}
        module.__class__ = derive(cls, type(module))
        if None in packed.values():
            for name in weights:
                module._parameters[name] = cast_parameter(module._parameters[name], context)
            return "cast, not packed: a weight is shared with a module of another kind"
        module._parameters.update(packed)
        return f"packed as {str(context.target(module._parameters[weights[0]])).removeprefix('torch.')}"

    def plain_module(self, dtype: torch.dtype) -> Any:
        """A module of torch's own that has all this one has, but its weights unpacked."""
        cast = dtype if dtype in FLOATING and not torch.is_autocast_enabled("cpu") else None
        plain: Any = object.__new__(self.source)
        plain.__dict__.update(self.__dict__)
        plain.__dict__["_parameters"] = {name: _plain(each, cast) for name, each in self._parameters.items()}
        return plain


def parameter_names(module: Any) -> list[str]:
    """In the order in which the operator takes them."""
    if isinstance(module, nn.RNNBase):
        return module._flat_weights_names
    return ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if module.bias else ())]


def cell_of(module: Any) -> str:
    """The name that the operator knows a module's computation by."""
    if isinstance(module, nn.RNNBase):
        return module.mode.lower()
    if isinstance(module, nn.RNNCell):
        return f"rnn_{module.nonlinearity}"
    return "lstm" if isinstance(module, nn.LSTMCell) else "gru"


def _gates_of(name: str, gates: int) -> int | None:
    return None if name.startswith("weight_hr") else gates


def _packed(weight: Any, gates: int | None, context: Context) -> PackedParameter | None:
    """The packed parameter, one for all who share this one; None: some need it in another form."""
    if id(weight) in context.shared:
        return None
    packed = context.replaced.get(id(weight))
    if packed is None:
        packed = PackedParameter.pack(weight, context.target(weight), gates=gates)
        context.replaced[id(weight)] = packed
    return packed if type(packed) is PackedParameter and packed.place.gates == gates else None


def _plain(parameter: Any, dtype: torch.dtype | None) -> Any:
    if type(parameter) is PackedParameter:
        parameter = parameter.unpack()
    return parameter if parameter is None or dtype is None else parameter.to(dtype)


def can_compute(module: Any, tensors: tuple[Any, ...]) -> bool:
    """Whether weights are packed and the input and states of dtypes that the operator takes."""
    parameters = module._parameters
    gates = GATES[cell_of(module)]
    for name, parameter in parameters.items():
        if name.startswith("weight_") and (
            type(parameter) is not PackedParameter or parameter.place.gates != _gates_of(name, gates)
        ):
            return False
    if not all(type(each) is Tensor and each.dtype in FLOATING and each.layout == torch.strided for each in tensors):
        return False
    if not torch.is_autocast_enabled("cpu") and any(each.dtype != tensors[0].dtype for each in tensors):
        return False
    biases = (each for name, each in parameters.items() if name.startswith("bias_"))
    return not wants_gradient(*tensors, *biases)


def output_dtype(cell: str, tensors: tuple[Tensor, ...], *, of_a_cell: bool = False) -> torch.dtype | None:
    """Under autocast torch computes some of these in its dtype as a whole, and of others only the products. None: the
    input's."""
    if not torch.is_autocast_enabled("cpu"):
        return None
    if cell == "gru" or (cell == "lstm" and of_a_cell):
        dtype = tensors[0].dtype
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
        return dtype
    return result_dtype(tensors[0])


def operands(module: Any) -> list[Tensor]:
    """The weights, packed, and the biases as they are."""
    found = (module._parameters[name] for name in parameter_names(module))
    return [each.place.packed if type(each) is PackedParameter else each for each in found]


class RecurrentLayers(Recurrent):
    mode: str
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    _flat_weights_names: list[str]

    @classmethod
    def replace(cls, module: Any, context: Context) -> str:
        done = super().replace(module, context)
        module._init_flat_weights()  # torch keeps a second list of the parameters
        return done

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        recurrent_layers: Any = self
        recurrent_layers._init_flat_weights()
        return self

    def forward(self, input: Any, hx: Any = None) -> Any:
        packed = isinstance(input, PackedSequence)
        if is_symbolic((input.data if packed else input, hx), {}):
            if packed:
                raise CannotRecord("it runs packed sequences")
            return recorder_of(input, hx).call_module(self, recurrent, input, hx)
        return recurrent(self, input, hx)

    def plain_forward(self, input: Any, hx: Any) -> Any:
        # oneDNN has no LSTM in fp16, which is what autocast asks it for.
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            with torch.autocast("cpu", enabled=False):
                return self.plain_forward(input, hx)
        plain: Any = self.plain_module((input.data if isinstance(input, PackedSequence) else input).dtype)
        plain._flat_weights = [plain._parameters[name] for name in self._flat_weights_names]
        plain._flat_weight_refs = [None] * len(plain._flat_weights)
        forward: Any = self.source.forward
        return forward(plain, input, hx)


@step("")
def recurrent(module: RecurrentLayers, input: Any, hx: Any = None) -> Any:
    sequence = input if isinstance(input, PackedSequence) else None
    x, states = input if sequence is None else sequence.data, _states(hx)
    if not _is_ours(module, x, states, sequence):
        return module.plain_forward(input, hx)
    cell, dtype = cell_of(module), output_dtype(cell_of(module), (x, *states))
    batched = sequence is not None or x.dim() == 3
    if not batched:
        x, states = x.unsqueeze(1), tuple(state.unsqueeze(1) for state in states)
    if sequence is not None:
        states = _in_order(states, sequence.sorted_indices) or (_zeros(module, x, int(sequence.batch_sizes[0])),)
    out, hidden, cell_state = _recurrent(
        x,
        operands(module),
        *(*states, None, None)[:2],
        None if sequence is None else sequence.batch_sizes,
        cell=cell,
        hidden_size=module.hidden_size,
        proj_size=module.proj_size,
        num_layers=module.num_layers,
        bias=module.bias,
        bidirectional=module.bidirectional,
        batch_first=module.batch_first and batched and sequence is None,
        out_dtype=dtype,
    )
    states = (hidden, cell_state) if cell == "lstm" else (hidden,)
    if sequence is not None:
        out = PackedSequence(out, sequence.batch_sizes, sequence.sorted_indices, sequence.unsorted_indices)
        states = _in_order(states, sequence.unsorted_indices)
    if not batched:
        out, states = out.squeeze(1), tuple(state.squeeze(1) for state in states)
    return out, states if cell == "lstm" else states[0]


def _states(hx: Any) -> tuple[Any, ...]:
    if hx is None:
        return ()
    return tuple(hx) if type(hx) in (tuple, list) else (hx,)


def _is_ours(module: RecurrentLayers, x: Tensor, states: tuple[Any, ...], sequence: PackedSequence | None) -> bool:
    """Whether this is a call that torch would take, and one for the operator."""
    if module.training and module.dropout > 0 and module.num_layers > 1:
        return False
    if not can_compute(module, (x, *states)) or x.numel() == 0 or x.shape[-1] != module.input_size:
        return False
    if x.dim() not in ((2, 3) if sequence is None else (2,)):
        return False
    first = module.num_layers * (2 if module.bidirectional else 1)
    batch: tuple[int, ...] = ()
    if sequence is not None:
        batch = (int(sequence.batch_sizes[0]),)
    elif x.dim() == 3:
        batch = (x.shape[0 if module.batch_first else 1],)
    features = [module.proj_size or module.hidden_size] + ([module.hidden_size] if module.mode == "LSTM" else [])
    expected = [(first, *batch, count) for count in features]
    return not states or [tuple(state.shape) for state in states] == expected


def _in_order(states: tuple[Tensor, ...], indices: Tensor | None) -> tuple[Tensor, ...]:
    return states if indices is None else tuple(state.index_select(1, indices) for state in states)


def _zeros(module: RecurrentLayers, x: Tensor, batch: int) -> Tensor:
    """A hidden state: it tells the operator's fake the number of sequences, which else stands in a tensor."""
    count = module.num_layers * (2 if module.bidirectional else 1)
    return x.new_zeros((count, batch, module.proj_size or module.hidden_size))


class PackedLSTM(RecurrentLayers, Replacement, nn.LSTM):
    source: ClassVar[type[nn.Module]] = nn.LSTM


class PackedGRU(RecurrentLayers, Replacement, nn.GRU):
    source: ClassVar[type[nn.Module]] = nn.GRU


class PackedRNN(RecurrentLayers, Replacement, nn.RNN):
    source: ClassVar[type[nn.Module]] = nn.RNN
