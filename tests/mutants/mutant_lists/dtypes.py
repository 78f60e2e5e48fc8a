"""Dtypes of 8 bits and fewer; elementwise functions."""

from . import CATALOGUE, CUDA, DEVICE, PASSES, breaks

SMALL, FUNCTIONS = "arrays/test_dtypes.py", "arrays/test_functions.py"
LAYOUTS, SCOPES = "arrays/test_layouts.py", "language/test_scopes.py"

PAIR = """"h"((u16)(%s.bits | %s.bits << 8)));
  return w;
#else
  return pair(cvt_f16(cvt_f32(lo)), cvt_f16(cvt_f32(hi)));
#endif
}
FN void cvt_from_e4m3x2"""

breaks(
    f"{PASSES}/subbyte.c",
    f"{SMALL}::test_small_integers",
    f"{SMALL}::test_small_integers_in_parts",
    f"{SMALL}::test_small_integers_refused",
    odd_slices_are_halved=("divide_index", "sizes[n - 1] % per ||", "false ||"),
    odd_starts_are_halved=("divide_index", "(!traced && starts[n - 1] % per) ||", ""),
    traced_starts_may_be_odd=("divide_index", "pm_divisor(g, pm_in(g, op, last)) % per", "false"),
    traced_starts_are_elements=(
        "divide_index",
        "g->operands.at[pm_get(g, op)->in + last] = half;",
        "(void)half;",
    ),
    tiles_keep_their_elements=(
        "divide_tiling",
        "tile[n - 1] /= per_byte(pm_typeof(p->g, pm_get(p->g, op)->out));",
        "(void)per_byte;",
    ),
    transposes_cut_bytes=(
        "visit",
        "if (transpose || !keeps_last(g, op)) note_transpose(p, op);",
        "(void)keeps_last, (void)note_turn;",
    ),
    odd_rows_are_cut=("check_rows", "t->dim[t->rank - 1] % per == 0", "t->dim[t->rank - 1] > 0"),
)
breaks(
    f"{PASSES}/layouts.c",
    f"{SMALL}::test_small_integers",
    f"{SMALL}::test_product_of_small_integers",
    halves_of_one_byte_are_equal=(
        "mark_op",
        "if (unpacks(p->g, op) || operand_varies(p, op)) mark(p, o->out);",
        "if (operand_varies(p, op)) mark(p, o->out);",
    ),
    packed_layouts_are_not_carried_back=(
        "operand_for",
        "case PM_LAY_PACK: return repacked(g, op, out, true)",
        "case PM_LAY_PACK: return 0",
    ),
)
breaks(
    f"{CUDA}/emit_registers.c",
    f"{SMALL}::test_small_integers",
    the_second_half_is_the_first=(
        "pm_cuda_PACK",
        'pm_at(e, in, "2 * r + 1"));',
        'pm_at(e, in, "2 * r"));',
    ),
)
breaks(
    f"{CUDA}/emit_pointwise.c",
    f"{SMALL}::test_conversions",
    f"{SMALL}::test_scalars",
    f"{FUNCTIONS}::test_bits_of_integers",
    small_integers_do_not_wrap=(
        "pm_convert_text",
        '"cvt_%s(%s)" : "wrap_%s((u32)(%s))"',
        '"cvt_%s(%s)" : "cvt_%s((f32)(%s))"',
    ),
    leading_zeros_are_counted_as_bits=("pm_cuda_CLZ", '"leading_zeros(%s)"', '"bit_count(%s)"'),
    sums_of_small_floats_have_an_operator=(
        "arithmetic",
        "if (pm_is_small_float(t)) return infix_f32(e, op, sign);",
        "if (pm_is_small_float(t)) return infix(e, op, sign);",
    ),
)
breaks(
    f"{CUDA}/block.c",
    f"{SMALL}::test_conversions",
    pairs_of_small_floats_are_of_the_result=(
        "find_group_convert",
        'pm_str(e, "cvt_from_%sx%d%s", short_name, group,',
        'pm_str(e, "cvt_from_%sx%d%s", from == PM_E4M3 ? "e5m2" : short_name, group,',
    ),
)
breaks(
    f"{DEVICE}/types.cuh",
    CATALOGUE,
    small_pairs_are_packed_in_reverse=("cvt_e4m3x2", '"f"(hi), "f"(lo)', '"f"(lo), "f"(hi)'),
    small_pairs_are_read_in_reverse=("e4m3_pair", "lo.bits | hi", "hi.bits | lo"),
    powers_of_two_round_down=("cvt_e8m0", "(b + 0x7fffffu) >> 23", "b >> 23"),
    the_halves_of_a_byte_change_places=("pack_4", "(lo & 15) | hi << 4", "(hi & 15) | lo << 4"),
    small_integers_lose_their_sign=("wrap_s4", "(i32)(x << 28) >> 28", "(i32)(x << 28 >> 28)"),
)
breaks(
    "csrc/python/promote.c",
    f"{SMALL}::test_functions_of_the_host",
    f"{SMALL}::test_refused_on_arrays",
    f"{FUNCTIONS}::test_integer_powers",
    f"{FUNCTIONS}::test_float_powers",
    small_dtypes_meet=(
        "join_nodes",
        "if (is_small(other)) return NO_WAY;",
        "if (is_small(other)) return small;",
    ),
    powers_have_five_bits=(
        "integer_power",
        "for (int k = 0; k < 6; k++) {",
        "for (int k = 0; k < 5; k++) {",
    ),
    large_static_powers_lose_bits=(
        "power",
        "fabs(exponent) > 1024)) {",
        "fabs(exponent) > 1e9)) {",
    ),
)
breaks(
    "pallas_mgpu/_jnp/elementwise.py",
    f"{FUNCTIONS}::test_two_floats",
    f"{FUNCTIONS}::test_parts_of_floats",
    hypot_overflows=("hypot", "high * sqrt(1 + ratio * ratio)", "sqrt(x * x + y * y)"),
    steps_from_zero_have_no_sign=(
        "nextafter",
        "(_bits(y) & _sign_mask(bits)) | 1",
        "(_bits(y) & 0) | 1",
    ),
    subnormals_have_no_exponent=("frexp", "where(small, 24, 0)", "where(small, 0, 0)"),
)
breaks(
    "pallas_mgpu/_jnp/activations.py",
    f"{FUNCTIONS}::test_over_an_axis",
    f"{FUNCTIONS}::test_activations",
    softmax_counts_what_is_left_out=("softmax", "e = elementwise.where(where, e, 0)", "pass"),
    softmax_overflows=("_shifted", "return x - top, top", "return x, 0 * top"),
)

breaks(
    f"{PASSES}/subbyte.c",
    f"{SMALL}::test_transposed_refs_of_small_dtypes",
    f"{SMALL}::test_two_bits_in_parts",
    transposed_indices_stay_in_place=(
        "transpose_index",
        "to->dims[rank] = kept[from.dims[k]];",
        "to->dims[rank] = rank + 0 * kept[from.dims[k]];",
    ),
    transposed_starts_stay_in_place=(
        "transpose_index",
        "const int64_t d = from.dims[k];",
        "const int64_t d = k;",
    ),
)

breaks(
    f"{CUDA}/device/types.cuh",
    f"{SMALL}::test_arithmetic_of_exponents",
    f"{SMALL}::test_small_integers",
    products_of_exponents_are_doubled=(
        "mul_e8m0",
        "x.bits + y.bits - 127",
        "x.bits + y.bits - 126",
    ),
    quotients_of_exponents_are_inverted=(
        "div_e8m0",
        "x.bits - y.bits + 127",
        "y.bits - x.bits + 127",
    ),
    exponents_wrap=("exponent_e8m0", "min(max(sum, 0), 254)", "sum"),
    two_bits_lie_in_the_wrong_half=(
        "pack_2",
        "(lo & 3) | (hi & 3) << 2",
        "(hi & 3) | (lo & 3) << 2",
    ),
)

breaks(
    f"{CUDA}/emit_registers.c",
    f"{LAYOUTS}::test_scratch_of_reductions",
    later_steps_repeat_the_first=(
        "combine_warps",
        'steps == 1 ? k : n == 1 ? b : pm_str(e, "b + %s", k)',
        "steps == 1 ? k : n == 1 ? b : k",
    ),
)

breaks(
    f"{PASSES}/sync.c",
    f"{SCOPES}::test_a_commit_of_one_warp_is_not_that_of_another",
    a_warp_commits_for_others=("soil_by", "if (in_warps(g, op)) return;", "(void)in_warps;"),
)

breaks(
    "pallas_mgpu/_trace.py",
    f"{SCOPES}::test_scratch_in_gmem",
    blocks_share_scratch=(
        "block_number",
        "block = block * size +",
        "block = block * 0 +",
    ),
)

breaks(
    "pallas_mgpu/_control.py",
    f"{SCOPES}::test_scope_of_one_thread",
    threads_share_barriers=(
        "_part",
        'return ref.at[_core.axis_index("thread", 0)] if alone else ref',
        "return ref.at[0] if alone else ref",
    ),
)
