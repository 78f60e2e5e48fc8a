"""Products of every type, and narrow operands that become wide."""

from . import CUDA, DEVICE, PASSES, breaks

PRODUCTS, WIDENING = "arrays/test_products.py", "compiler/test_widening.py"

BYTES = f"{WIDENING}::test_every_number[sm_90a-s8-bf16-]"
breaks(
    f"{DEVICE}/widen.cuh",
    BYTES,
    BYTES.replace("-]", "-_apart]"),
    signs_of_bytes_are_their_second_bit=(
        "bf16_of_s8",
        "bits_under(p, 0x00800080u, k)",
        "bits_under(p, 0x00400040u, k)",
    ),
    pairs_of_bytes_are_in_another_order=(
        "cvt_from_s8x4_apart",
        "(u8)x[2 * k] | (u32)(u8)x[2 * k + 1] << 8",
        "(u8)x[2 * k + 1] | (u32)(u8)x[2 * k] << 8",
    ),
    upper_bytes_are_in_another_order=(
        "bf16_of_s8",
        "upper ? 0x5352 : 0x5150",
        "upper ? 0x5253 : 0x5150",
    ),
)
breaks(
    f"{DEVICE}/widen.cuh",
    WIDENING,
    signed_bytes_keep_half_the_range=(
        "cvt_from_s8x4",
        '"r"(p[k]), "r"(0x64806480u)',
        '"r"(p[k]), "r"(0x64006400u)',
    ),
    unsigned_bytes_lose_their_last_bit=(
        "cvt_from_u8x4",
        '"r"(0x43804380u));',
        '"r"(0x43004300u));',
    ),
    bytes_widen_in_another_order=(
        "cvt_from_s8x4",
        "0x7650 | k)) - 8388736.0f",
        "0x7650 | (3 - k))) - 8388736.0f",
    ),
    high_halves_are_not_divided=("cvt_from_4x8", '"r"(0x2c003c00u)', '"r"(0x3c003c00u)'),
    both_halves_are_the_low_one=("spread_4x8", "by ? w : w >> 4", "w"),
    bytes_apart_lose_their_high_half=("spread_4x8", "(0x10000u >> (4 - by)) + 1", "0x10001u"),
    bits_are_joined_by_and=(
        "bits_under",
        'asm("lop3.b32 %0, %1, %2, %3, 0x6a;"',
        'asm("lop3.b32 %0, %1, %2, %3, 0x80;"',
    ),
)
breaks(
    f"{DEVICE}/thread.cuh",
    WIDENING,
    odd_bytes_are_even=(
        "swap_bytes",
        "step == 1 ? 0x7531 : 0x7632); const",
        "step == 1 ? 0x6420 : 0x7632); const",
    ),
    words_come_back_swapped=(
        "swap_bytes",
        "*x = pick_bytes(first, second, step == 1 ? 0x5140 : 0x5410);",
        "*x = pick_bytes(second, first, step == 1 ? 0x5140 : 0x5410);",
    ),
)
breaks(
    f"{DEVICE}/types.cuh",
    WIDENING,
    nibbles_are_bytes_apart=(
        "pack_nibbles",
        "(bits_of(x[k]) & 15) << (4 * k)",
        "(bits_of(x[k]) & 15) << (8 * k)",
    ),
    pairs_are_joined_in_reverse=(
        "pair",
        "return bits_of(lo) | bits_of(hi) << 16;",
        "return bits_of(hi) | bits_of(lo) << 16;",
    ),
    differences_of_pairs_are_sums=(
        "sub_x2",
        'asm("sub.rn.bf16x2 %0, %1, %2;"',
        'asm("add.rn.bf16x2 %0, %1, %2;"',
    ),
    products_of_pairs_are_squares=(
        "mul_x2",
        'asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(b0, b1)));',
        'asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(w) : "r"(pair(a0, a1)), "r"(pair(a0, a1)));',
    ),
)
breaks(
    f"{CUDA}/emit_mma.c",
    f"{PRODUCTS}::test_mma",
    rows_of_a_are_steps=(
        "pm_cuda_MMA",
        '"%s(&%s[(%s * %lld + %s) * 4], &a[(%s * %lld + %s) * 4], &b[(%s * %lld + %s) * 2]);"',
        '"%s(&%s[(%s * %lld + %s) * 4], &a[(%s * %lld + %s) * 2], &b[(%s * %lld + %s) * 2]);"',
    ),
)
breaks(
    f"{CUDA}/emit_wgmma.c",
    f"{PRODUCTS}::test_wgmma_of_fp8",
    f"{PRODUCTS}::test_wgmma_of_integers",
    chunks_have_steps_of_16=("operand_of", "pm_min(s / step, k_steps)", "pm_min(s / 16, k_steps)"),
    registers_of_a_step_by_2=(
        "issue_row",
        '"a", m, k_steps * 4, k * 4);',
        '"a", m, k_steps * 4, k * 2);',
    ),
)
breaks(
    f"{PASSES}/sync.c",
    f"{PRODUCTS}::test_registers_of_a_product_in_flight",
    iterations_end_with_products_in_flight=(
        "await_registers",
        "if (n == NONE) return;",
        "return;",
    ),
    turns_wait_for_all_products=(
        "since_last",
        "since = registers ? 0 : since + 1;",
        "since = 0;",
    ),
    products_in_branches_are_over=(
        "since_last",
        "if (found != NONE) since",
        "if (found < NONE) since",
    ),
    waits_for_others_are_enough=(
        "since_last",
        "if (n >= 0 && n <= since) since",
        "if (n >= 0) since",
    ),
)
breaks(
    f"{CUDA}/emit_exchange.c",
    f"{PRODUCTS}::test_wgmma_of_widened_operands",
    bytes_swap_in_other_pairs=(
        "bytes_by_shuffles",
        '"swap_bytes<%lld>(&w[k], &w[k + 1], lane & %d, %d);", step',
        '"swap_bytes<%lld>(&w[k], &w[k + 1], lane & %d, %d);", 3 - step',
    ),
)
breaks(
    f"{CUDA}/block.c",
    f"{PRODUCTS}::test_conversions_of_all_numbers",
    packed_elements_begin_elsewhere=(
        "emit_group_convert",
        'pm_at(e, c.bytes, "r / 2")',
        'pm_at(e, c.bytes, "r")',
    ),
)
breaks(
    "csrc/ir/mma.c",
    f"{PRODUCTS}::test_wgmma_of_fp8",
    bytes_of_a_lie_as_halves=(
        "pm_mma_layout",
        "(pm_layout_name_id)m->in[k];",
        "bits == 8 ? PM_LAYOUT_WGMMA : (pm_layout_name_id)m->in[k];",
    ),
)
breaks(
    f"{PASSES}/transforms.c",
    f"{PRODUCTS}::test_refused",
    bytes_may_lie_along_n=(
        "check_majors",
        "} else if (v.dim[2 - k].inner != 1) {",
        "} else if (v.dim[2 - k].inner < 1) {",
    ),
)
breaks(
    "csrc/ir/mma.c",
    f"{PRODUCTS}::test_wgmma_of_float32",
    words_of_a_lie_as_halves=(
        "pm_mma_layout",
        "(pm_layout_name_id)m->in[k];",
        "bits == 32 ? PM_LAYOUT_WGMMA : (pm_layout_name_id)m->in[k];",
    ),
)
