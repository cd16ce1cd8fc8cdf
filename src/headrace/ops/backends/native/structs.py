"""The structs of native/headrace.h, field by field. A library whose structs differ is not called."""

import struct
from itertools import zip_longest

_TYPES = {"T": "Pqqq"}  # hr_tensor


class Layout(struct.Struct):
    """A C struct. fields: "type name name …, type name …", with the types of the module struct, and T for hr_tensor."""

    def __init__(self, fields: str):
        self.fields: dict[str, tuple[str, int]] = {}  # type and offset in bytes, by name
        types = "@"
        for group in fields.split(","):
            kind, *names = group.split()
            for name in names:
                code = _TYPES.get(kind, kind)
                self.fields[name] = kind, struct.calcsize(f"{types}0{code[0]}")
                types += code
        super().__init__(f"{types}0P")  # ends at a multiple of the size of an address, as the structs of the header do

    def offset(self, field: str) -> int:
        """Returns where a field begins, in bytes."""
        return self.fields[field][1]


LAYOUTS = {
    "hr_tensor": Layout("P data, q batch token head"),
    "hr_problem": Layout(
        "i abi dtype decay delta chunk threads, f scale, q B T H Hq K V sequences, P cu_seqlens, "
        "T q k v log_decay beta write_gate read_gate, P initial_state bonus, f normalizer"
    ),
    "hr_gradients": Layout("T q k v log_decay beta write_gate read_gate, P initial_state bonus"),
    "hr_convolution": Layout("q width, P weight history"),
    "hr_scan": Layout("P A, T dt, P kept"),
    "hr_scan_gradients": Layout("T u dt, P A B C initial"),
    "hr_layer": Layout(
        "i dtype feature_map head_norm qk_norm rotary decay rule beta norm gate order read write source activation "
        "gate_scale, f scale logit_scale head_eps norm_eps group_eps sum_eps temperature gate_range amplitude, "
        "q D H Hq Hk Hv K F V turned window conv_width decay_reads gate_reads, "
        "P frequencies conv_weight conv_bias q_norm k_norm map_q map_k window_factor decay_up decay_bias decay_log "
        "bonus read_scores write_scores skip gate_up gate_bias norm_weight norm_bias memory conv tokens k_window "
        "v_window decay_window"
    ),
    "hr_attention": Layout(
        "i dtype sinks_dtype null, f scale amplitude, q H Hkv d turned first window length room, "
        "P frequencies sinks k v valid seen"
    ),
    "hr_operation": Layout(
        "i kind what dtype weight_dtype add layer, q in other out inputs outputs, f number, P weight bias scale state"
    ),
    "hr_program": Layout("i abi threads, q rows width operations layers vocabulary, P tokens, q in_order attentions"),
}


def lists(text: str) -> dict[str, list[str]]:
    """Returns the words of each line by its first."""
    return {name: words for name, *words in map(str.split, text.splitlines())}


def fault(of_library: str) -> str | None:
    """Returns the first difference to the structs that a library lists (hr_structs in native/headrace.h), or None."""
    listed = lists(of_library)
    for name, layout in LAYOUTS.items():
        packed = [f"{field}:{kind}@{offset}" for field, (kind, offset) in layout.fields.items()]
        for ours, theirs in zip_longest([*packed, f"end@{layout.size}"], listed.get(name, []), fillvalue="nothing"):
            if ours != theirs:
                return f"{name} has {theirs} in the library, and {ours} in structs.py"
    return None
