//! Elementary functions with one result on every machine.
//!
//! The system's maths library differs between machines, so nothing here calls it. Each
//! function is defined in `docs/arithmetic.md` and is within 2 ulp of the exact value for
//! every input (`examples/ulp_sweep.rs` tries all 2^32 of them). Only `+ − × ÷`, fused
//! multiply-add and bit operations are used, all of which exist lane by lane on every
//! vector unit.

const LOG2_E: f32 = f32::from_bits(0x3fb8_aa3b);
/// ln 2 rounded to f32, and the rest of it.
const LN2_HI: f32 = f32::from_bits(0x3f31_7218);
const LN2_LO: f32 = f32::from_bits(0xb102_e308);
/// Adding and subtracting this rounds to the nearest integer for |x| < 2^22.
const ROUND: f32 = 12_582_912.0;

/// Minimax fit of (e^r − 1 − r)/r² on ±ln2/2, relative error of e^r 2^-28.
const EXP_Q: [f32; 5] = [
    f32::from_bits(0x3f00_0000),
    f32::from_bits(0x3e2a_aa47),
    f32::from_bits(0x3d2a_aa2f),
    f32::from_bits(0x3c09_1def),
    f32::from_bits(0x3ab6_da75),
];
/// Minimax fit of (tanh x − x)/x³ in z = x² for |x| ≤ 0.625, relative error of tanh 2^-32.
const TANH_P: [f32; 6] = [
    f32::from_bits(0xbeaa_aaaa),
    f32::from_bits(0x3e08_8836),
    f32::from_bits(0xbd5c_f7bb),
    f32::from_bits(0x3cb1_ca41),
    f32::from_bits(0xbc06_0fc1),
    f32::from_bits(0x3b0c_ba63),
];
/// Minimax fit of (2 atanh(s)/s − 2)/z in z = s² for z ≤ 0.0296.
const LOG1P_L: [f32; 4] = [
    f32::from_bits(0x3f2a_aaab),
    f32::from_bits(0x3ecc_ccf7),
    f32::from_bits(0x3e92_2db8),
    f32::from_bits(0x3e6e_fcd3),
];

/// Where `tanh` changes from its polynomial to the exponential.
const TANH_SPLIT: f32 = 0.625;

#[inline(always)]
fn horner<const N: usize>(c: &[f32; N], x: f32) -> f32 {
    let mut p = c[N - 1];
    for i in (0..N - 1).rev() {
        p = p.mul_add(x, c[i]);
    }
    p
}

/// 2^k for −126 ≤ k ≤ 127.
#[inline(always)]
fn pow2(k: i32) -> f32 {
    f32::from_bits(((k + 127) as u32) << 23)
}

/// e^x. Overflows to infinity above 88.72, reaches zero below −103.97, NaN stays NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let x = x.clamp(-104.0, 89.0);
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let hi = n.mul_add(-LN2_HI, x);
    let lo = n * -LN2_LO;
    let r = hi + lo;
    // 1 + hi loses bits of hi; they are recovered exactly and go into the small terms.
    let one_plus = 1.0 + hi;
    let lost = hi - (one_plus - 1.0);
    let p = one_plus + ((r * r).mul_add(horner(&EXP_Q, r), lo) + lost);
    // The unit of `shifted` in its last place is 1, so its bits count up with n; a cast of n would be
    // taken out of the lanes, to look for NaN. Whatever this makes of NaN, p is NaN then.
    let n = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    // Two factors, because 2^n itself may lie outside the normal range.
    let a = n >> 1;
    (p * pow2(a)) * pow2(n - a)
}

/// 1/(1 + e^−x).
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let numerator = if x >= 0.0 { 1.0 } else { e };
    let denominator = 1.0 + e;
    // The denominator was rounded; what it lost is known exactly and taken off the quotient.
    let lost = e - (denominator - 1.0);
    let quotient = numerator / denominator;
    quotient.mul_add(-lost, quotient)
}

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    // Both are computed, then one is taken: a branch would keep lanes apart.
    let z = x * x;
    let near = (x * z).mul_add(horner(&TANH_P, z), x);
    let far = (1.0 - 2.0 / (exp(2.0 * a) + 1.0)).copysign(x);
    if a < TANH_SPLIT { near } else { far }
}

/// ln(1 + e^x).
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + log1p_unit(exp(-x.abs()))
}

/// ln(1 + e) for e in [0, 1].
#[inline(always)]
fn log1p_unit(e: f32) -> f32 {
    let (f, k) = if e < 0.5 { (e, 0.0) } else { (0.5 * (e - 1.0), 1.0) };
    let s = f / (2.0 + f);
    let z = s * s;
    let h = 0.5 * f * f;
    let r = z * horner(&LOG1P_L, z);
    f - (h - s.mul_add(h + r, k * LN2_LO)) + k * LN2_HI
}

/// x · sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `(beta·tanh(g/beta) · sigmoid(g)) · (linear_beta·tanh(u/linear_beta))`: the sigmoid sees
/// the uncapped gate.
#[inline(always)]
pub fn situ(g: f32, u: f32, beta: f32, linear_beta: f32) -> f32 {
    (beta * tanh(g / beta) * sigmoid(g)) * (linear_beta * tanh(u / linear_beta))
}
