//! Products in 512-bit vectors: a register is a line, eight rows of eight weights.
//!
//! The plain algorithm is [`TrellisMatrix::multiply`]. Of eight inputs of eight rows, one shift over two
//! lines brings the codes to the ends of their words, two bit-wise gathers make sixteen-bit windows of the
//! even and the odd inputs, two multiplications their entries, and the tables are byte permutations, which
//! ignore all but six bits. Weights keep their bias of 64; products of it are taken off per block.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::format::power;
use super::{Activations, BLOCK, GROUP, LINE, TILE, TrellisMatrix};

/// Vectors that share decoded weights.
const MANY: usize = 4;
/// What weights are increased by, so that none is below 0.
const BIAS: i32 = 64;

/// As [`TrellisMatrix::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vnni")]
pub(super) fn multiply(m: &TrellisMatrix<'_>, x: &Activations, out: &mut [f32]) {
    let n = m.check(x, out);
    for tile in 0..m.rows.div_ceil(TILE) {
        let mut v = 0;
        while v < n {
            if n - v >= MANY {
                put(m, tile, v, n, &multiply_tile::<MANY>(m, x, tile, v), out);
                v += MANY;
            } else {
                put(m, tile, v, n, &multiply_tile::<1>(m, x, tile, v), out);
                v += 1;
            }
        }
    }
}

/// Applies the rows' scales; `sums` (vectors, 8 rows).
fn put(
    m: &TrellisMatrix<'_>,
    tile: usize,
    first: usize,
    n: usize,
    sums: &[[f32; TILE]],
    out: &mut [f32],
) {
    for row in tile * TILE..m.rows.min((tile + 1) * TILE) {
        for (v, sums) in sums.iter().enumerate() {
            out[row * n + first + v] = sums[row % TILE] * m.scale(row);
        }
    }
}

/// Unscaled products of a tile's rows with `V` vectors from `first` on.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vnni")]
fn multiply_tile<const V: usize>(
    m: &TrellisMatrix<'_>,
    x: &Activations,
    tile: usize,
    first: usize,
) -> [[f32; TILE]; V] {
    let (trellis, blocks) = (m.trellis, m.cols / BLOCK);
    let lines = &m.codes[tile * trellis.tile_bytes(m.cols)..][..trellis.tile_bytes(m.cols)];
    let (high, low) = (&x.high[first * m.cols..], &x.low[first * m.cols..]);
    assert!(high.len() >= V * m.cols && low.len() >= V * m.cols);
    let (scales, sums) = (&x.scales[first * blocks..], &x.sums[first * blocks..]);

    // Where each byte of the windows of even and odd inputs begins in a row's word.
    let from = |odd: usize| -> [u8; 64] {
        std::array::from_fn(|i| (trellis.offset(i % 8 / 2 * 2 + odd) + i % 2 * 8) as u8)
    };
    let (even, odd) = (bytes(&from(0)), bytes(&from(1)));
    let row_of_byte = bytes(&std::array::from_fn(|i| (i / 8) as u8));
    // Weights with a bias, because the products are of unsigned bytes with signed ones.
    let biased = |class| m.tables.weights(class).map(|units| (i32::from(units) + BIAS) as u8);
    let [table0, table1] = [bytes(&biased(0)), bytes(&biased(1))];
    let powers: [f32; 16] = std::array::from_fn(|side| power(side as u8));
    // SAFETY: sixteen values.
    let powers = unsafe { _mm512_loadu_ps(powers.as_ptr()) };
    let multiplier = _mm512_set1_epi16(trellis.multiplier() as i16);
    let high_bytes = _mm512_set1_epi16(0xff00u16 as i16);
    let rate = _mm512_set1_epi64(trellis.rate as i64);

    let mut f = [_mm512_setzero_ps(); V];
    let mut bit = 0;
    // The instruction takes counts modulo 64.
    let mut shift = _mm512_setzero_si512();
    for block in 0..blocks {
        let side = u64::from_le_bytes(*m.tile_sides(tile, block / 2)) >> (block % 2 * 4);
        // Each row's nibble in every byte of its word, below bits without meaning.
        let side = _mm512_permutexvar_epi8(row_of_byte, _mm512_set1_epi64(side as i64));
        let class1 = _mm512_test_epi8_mask(side, _mm512_set1_epi8(8));
        let mut w = [_mm512_setzero_si512(); BLOCK / GROUP];
        for w in &mut w {
            debug_assert!(bit / 64 * LINE + 2 * LINE <= lines.len());
            // SAFETY: `lines` are those of the tile, and no group of inputs begins in the last.
            let (this, next) = unsafe {
                let line = lines.as_ptr().add(bit / 64 * LINE);
                (_mm512_loadu_si512(line.cast()), _mm512_loadu_si512(line.add(LINE).cast()))
            };
            let codes = _mm512_shrdv_epi64(this, next, shift);
            let a = _mm512_mullo_epi16(_mm512_multishift_epi64_epi8(even, codes), multiplier);
            let b = _mm512_mullo_epi16(_mm512_multishift_epi64_epi8(odd, codes), multiplier);
            // Of both the upper bytes: an entry and two bits more.
            let entry = _mm512_ternarylogic_epi32(_mm512_srli_epi16(a, 8), b, high_bytes, 0xd8);
            let of_class0 = _mm512_permutexvar_epi8(entry, table0);
            *w = _mm512_mask_permutexvar_epi8(of_class0, class1, entry, table1);
            bit += trellis.rate;
            shift = _mm512_add_epi64(shift, rate);
        }
        let power = _mm512_permutexvar_ps(side, powers);
        for (v, f) in f.iter_mut().enumerate() {
            let bias = -BIAS * sums[v * blocks + block];
            // A row has two lanes, and one bias.
            let mut of_low = _mm512_maskz_set1_epi32(0x5555, bias);
            let mut of_high = _mm512_setzero_si512();
            for (group, &w) in w.iter().enumerate() {
                let at = v * m.cols + block * BLOCK + group * GROUP;
                // SAFETY: there are V · cols bytes of each, as asserted above.
                let (high, low) = unsafe {
                    let high = high.as_ptr().add(at).cast::<i64>();
                    (high.read_unaligned(), low.as_ptr().add(at).cast::<i64>().read_unaligned())
                };
                of_high = _mm512_dpbusd_epi32(of_high, w, _mm512_set1_epi64(high));
                of_low = _mm512_dpbusd_epi32(of_low, w, _mm512_set1_epi64(low));
            }
            let halves = _mm512_add_epi32(_mm512_slli_epi32(of_high, 7), of_low);
            let total = _mm512_add_epi32(halves, _mm512_shuffle_epi32(halves, 0xb1));
            let scale = _mm512_mul_ps(power, _mm512_set1_ps(scales[v * blocks + block]));
            *f = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), scale, *f);
        }
    }
    let mut out = [[0.0; TILE]; V];
    for (out, f) in out.iter_mut().zip(f) {
        let mut lanes = [0.0f32; 16];
        // SAFETY: sixteen values.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), f) };
        for (row, out) in out.iter_mut().enumerate() {
            *out = lanes[2 * row];
        }
    }
    out
}

#[target_feature(enable = "avx512f")]
#[inline]
fn bytes(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}
