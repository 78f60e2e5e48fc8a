"""Dtypes of 8 bits and fewer; elementwise functions."""

from . import CATALOGUE, CUDA, DEVICE, PASSES, breaks

SMALL, FUNCTIONS = "test_dtypes.py", "test_functions.py"

PAIR = """"h"((u16)(%s.bits | %s.bits << 8)));
  return w;
}
FN void widen_e4m3x2"""

breaks(
    f"{PASSES}/packed.c",
    f"{SMALL}::test_small_integers",
    f"{SMALL}::test_small_integers_in_parts",
    f"{SMALL}::test_small_integers_refused",
    odd_slices_are_halved=("sizes[n - 1] % 2 ||", "false ||"),
    odd_starts_are_halved=("(!traced && starts[n - 1] % 2) ||", ""),
    traced_starts_may_be_odd=("pm_divisor(g, pm_in(g, op, last)) % 2", "false"),
    traced_starts_are_elements=(
        "g->operands.at[pm_get(g, op)->in + last] = pm_get(g, half)->out;",
        "(void)half;",
    ),
    tiles_keep_their_elements=("tile[n - 1] /= 2;", "tile[n - 1] /= 1;"),
    transposes_cut_bytes=("dims[n - 1] != n - 1", "dims[n - 1] > n"),
    odd_rows_are_cut=("t->dim[t->rank - 1] % 2 == 0", "t->dim[t->rank - 1] > 0"),
)
breaks(
    f"{PASSES}/layouts.c",
    f"{SMALL}::test_small_integers",
    f"{SMALL}::test_product_of_small_integers",
    halves_of_one_byte_are_equal=(
        "if (o->code == PM_OP_UNPACK || operand_varies(p, op)) mark(p, o->out);",
        "if (operand_varies(p, op)) mark(p, o->out);",
    ),
    packed_layouts_are_not_carried_back=(
        "case PM_OP_UNPACK: return repacked(g, op, out, true);",
        "case PM_OP_UNPACK: return 0;",
    ),
)
breaks(
    f"{CUDA}/emit_shape.c",
    f"{SMALL}::test_small_integers",
    the_second_half_is_the_first=('pm_at(e, in, "2 * r + 1"));', 'pm_at(e, in, "2 * r"));'),
)
breaks(
    f"{CUDA}/emit_pointwise.c",
    f"{SMALL}::test_conversions",
    f"{SMALL}::test_scalars",
    f"{FUNCTIONS}::test_bits_of_integers",
    small_integers_do_not_wrap=(
        '"to_%s(%s)" : "wrap_%s((u32)(%s))"',
        '"to_%s(%s)" : "to_%s((f32)(%s))"',
    ),
    leading_zeros_are_counted_as_bits=('"leading_zeros(%s)"', '"bit_count(%s)"'),
    sums_of_small_floats_have_an_operator=(
        "if (pm_is_small_float(t)) return infix_f32(e, op, sign);",
        "if (pm_is_small_float(t)) return infix(e, op, sign);",
    ),
)
breaks(
    f"{CUDA}/block.c",
    f"{SMALL}::test_conversions",
    pairs_of_small_floats_are_of_the_result=(
        'fn = pm_str(e, "widen_%sx2", short_name);',
        'fn = pm_str(e, "widen_%sx2", from == PM_E4M3 ? "e5m2" : "e4m3");',
    ),
)
breaks(
    f"{DEVICE}/types.cuh",
    CATALOGUE,
    small_pairs_are_packed_in_reverse=(
        'asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(hi), "f"(lo));',
        'asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(lo), "f"(hi));',
    ),
    small_pairs_are_read_in_reverse=(PAIR % ("lo", "hi"), PAIR % ("hi", "lo")),
    powers_of_two_round_down=("(b + 0x7fffffu) >> 23", "b >> 23"),
    the_halves_of_a_byte_change_places=("(lo & 15) | hi << 4", "(hi & 15) | lo << 4"),
    small_integers_lose_their_sign=("(i32)(x << 28) >> 28", "(i32)(x << 28 >> 28)"),
)  # fmt: skip
breaks(
    "csrc/python/promote.c",
    f"{SMALL}::test_functions_of_the_host",
    f"{SMALL}::test_refused_on_arrays",
    f"{FUNCTIONS}::test_integer_powers",
    f"{FUNCTIONS}::test_float_powers",
    small_dtypes_meet=("if (is_small(other)) return NO_WAY;", "if (is_small(other)) return small;"),
    powers_have_five_bits=("for (int k = 0; k < 6; k++) {", "for (int k = 0; k < 5; k++) {"),
    large_static_powers_lose_bits=("fabs(exponent) > 1024)) {", "fabs(exponent) > 1e9)) {"),
)
breaks(
    "pallas_mgpu/_elementwise.py",
    f"{FUNCTIONS}::test_two_floats",
    f"{FUNCTIONS}::test_parts_of_floats",
    hypot_overflows=("high * jnp.sqrt(1 + ratio * ratio)", "jnp.sqrt(x * x + y * y)"),
    steps_from_zero_have_no_sign=("(_bits(y) & _sign_mask(bits)) | 1", "(_bits(y) & 0) | 1"),
    subnormals_have_no_exponent=("jnp.where(small, 24, 0)", "jnp.where(small, 0, 0)"),
)
breaks(
    "pallas_mgpu/nn.py",
    f"{FUNCTIONS}::test_over_an_axis",
    f"{FUNCTIONS}::test_activations",
    softmax_counts_what_is_left_out=("        e = jnp.where(where, e, 0)\n", "        pass\n"),
    softmax_overflows=("return x - top, top", "return x, 0 * top"),
)
