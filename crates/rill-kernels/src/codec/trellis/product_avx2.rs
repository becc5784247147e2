//! Products in 256-bit vectors: a register is one row in each half, sixteen inputs.
//!
//! The plain algorithm is [`TrellisMatrix::multiply`]. There is no shift of 16-bit lanes by counts of their
//! own, but a product shifts up. The sixteen bits from some byte on hold a window of twelve if it
//! begins in one of their lowest five bits; where it does not, the word moved down by four bits has it. So a
//! window costs a shuffle of bytes, a mask, and one multiplication that brings it to the top and hashes it.
//! Wider windows are put together from two pieces. A register then has the class of one row in a
//! half, whose table is four byte shuffles of sixteen entries, of which those that an index lies below give
//! zero. Shuffles hold the difference to the part below, so that XOR adds up to the entry: no selections.
//! Weights keep their bias of 64; products of it are taken off per block.
//!
//! Instructions for 64 weights of one vector, widths up to 12: 7 for the codes (a quarter of the counts), 18 for
//! the entries, 20 for the tables, 13 for the sums, 4 to end a block: 62, of which three can run at once.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::{
    Activations, BLOCK, CLASSES, GROUP, LINE, TILE, Trellis, TrellisMatrix, TrellisTables, ZERO,
};

/// Vectors that share decoded weights.
const MANY: usize = 4;
/// Rows of a register of codes: half a line.
const ROWS: usize = 4;
/// Inputs of a row in half a register.
const INPUTS: usize = 16;
/// Widest window that is found in sixteen bits, and largest rate at which a word has sixteen such windows.
const NARROW: usize = 12;
const SIXTEEN: usize = 28;
/// Bits that a word is moved down by for the windows that cross a byte too late.
const DOWN: usize = 4;

/// As [`TrellisMatrix::multiply`].
#[target_feature(enable = "avx2,fma")]
pub(super) fn multiply(m: &TrellisMatrix<'_>, x: &Activations, out: &mut [f32]) {
    if m.trellis.width <= NARROW && m.trellis.rate <= SIXTEEN {
        multiply_with::<false>(m, &Windows::narrow(m.trellis), x, out);
    } else {
        multiply_with::<true>(m, &Windows::wide(m.trellis), x, out);
    }
}

#[target_feature(enable = "avx2,fma")]
fn multiply_with<const WIDE: bool>(
    m: &TrellisMatrix<'_>,
    windows: &Windows,
    x: &Activations,
    out: &mut [f32],
) {
    let (n, tables) = (m.check(x, out), differences(&m.tables));
    for tile in 0..m.rows.div_ceil(TILE) {
        let mut v = 0;
        while v < n {
            if n - v >= MANY {
                let sums = multiply_tile::<MANY, WIDE>(m, windows, &tables, x, tile, v);
                put(m, tile, v, n, &sums, out);
                v += MANY;
            } else {
                let sums = multiply_tile::<1, WIDE>(m, windows, &tables, x, tile, v);
                put(m, tile, v, n, &sums, out);
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

/// How the entries of sixteen inputs of four rows come out of words that begin with their codes.
struct Windows {
    /// Narrow: for rows 0 and 2, then for rows 1 and 3, the bytes of eight inputs' windows from the word as it is and
    /// of eight from the one moved down. Wide: the lower byte of a window and the one after it, of even and of
    /// odd inputs of all rows, then the upper byte and the one after it.
    bytes: [__m256i; 4],
    /// Narrow: the bits of a window, of either eight.
    masks: [__m256i; 2],
    /// Narrow: what brings a window of either eight to the top, times the multiplier. Wide: what brings the
    /// first byte of even and of odd inputs to the upper one of a lane.
    factors: [__m256i; 2],
    multiplier: __m256i,
    /// Which input each byte of the entries belongs to, the same in both halves.
    order: __m256i,
}

// Never inlined: where compilers see that factors are powers of two, they put shifts in the place of
// multiplications, of lanes twice as wide, and products take twice as long.
impl Windows {
    #[target_feature(enable = "avx2")]
    #[inline(never)]
    fn narrow(trellis: Trellis) -> Self {
        let first: [usize; INPUTS] = std::array::from_fn(|input| trellis.first_bit(input));
        let order = narrow_order(&first);
        let (mut bytes, mut masks, mut factors) =
            ([[0u8; 32]; 4], [[0u16; 16]; 2], [[0u16; 16]; 2]);
        for set in 0..2 {
            for lane in 0..16 {
                let bit = first[usize::from(order[set * 8 + lane % 8])] - set * DOWN;
                for row in 0..2 {
                    for i in 0..2 {
                        bytes[row * 2 + set][2 * lane + i] = (row * 8 + bit / 8 + i) as u8;
                    }
                }
                masks[set][lane] = 0xfff << (bit % 8);
                // The multiplier is a multiple of 4, and a window begins in bit 4 at most.
                factors[set][lane] = trellis.multiplier() << 2 >> (bit % 8);
            }
        }
        let both: [u8; 32] = std::array::from_fn(|i| order[i % INPUTS]);
        Self {
            bytes: bytes.map(|b| load(&b)),
            masks: masks.map(|m| lanes(&m)),
            factors: factors.map(|f| lanes(&f)),
            multiplier: _mm256_setzero_si256(),
            order: load(&both),
        }
    }

    /// Of a window that begins at bit t of byte b, the 16 bits from byte b on, times 2^(8 − t), have the
    /// lower byte as their upper one, and the 16 bits from byte b + 1 on, times the same, have the upper byte.
    #[target_feature(enable = "avx2")]
    #[inline(never)]
    fn wide(trellis: Trellis) -> Self {
        let (mut bytes, mut factors) = ([[0u8; 32]; 4], [[0u16; 16]; 2]);
        for odd in 0..2 {
            for lane in 0..16 {
                let offset = trellis.offset(lane % 4 * 2 + odd);
                let byte = lane / 4 % 2 * 8 + offset / 8;
                for i in 0..2 {
                    bytes[odd][2 * lane + i] = (byte + i) as u8;
                    bytes[2 + odd][2 * lane + i] = (byte + 1 + i) as u8;
                }
                factors[odd][lane] = 1 << (8 - offset % 8);
            }
        }
        let order: [u8; 32] = std::array::from_fn(|i| (i % INPUTS) as u8);
        Self {
            bytes: bytes.map(|b| load(&b)),
            masks: [_mm256_setzero_si256(); 2],
            factors: factors.map(|f| lanes(&f)),
            multiplier: _mm256_set1_epi16(trellis.multiplier() as i16),
            order: load(&order),
        }
    }

    /// Entries of rows 0 and 2, then 1 and 3, of sixteen inputs whose codes `codes` begins with.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn narrow_entries(&self, codes: __m256i) -> [__m256i; 2] {
        let down = _mm256_srli_epi64(codes, DOWN as i32);
        let of = |bytes: __m256i, set: usize, codes: __m256i| {
            let window = _mm256_and_si256(_mm256_shuffle_epi8(codes, bytes), self.masks[set]);
            _mm256_srli_epi16(_mm256_mullo_epi16(window, self.factors[set]), 10)
        };
        let [a, b, c, d] = self.bytes;
        [
            _mm256_packus_epi16(of(a, 0, codes), of(b, 1, down)),
            _mm256_packus_epi16(of(c, 0, codes), of(d, 1, down)),
        ]
    }

    /// The same, of inputs whose first eight's codes `codes` begins with, and the other eight's `next`.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn wide_entries(&self, codes: __m256i, next: __m256i) -> [__m256i; 2] {
        let (first, second) = (self.eight(codes), self.eight(next));
        [_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second)]
    }

    /// Entries of eight inputs of four rows.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn eight(&self, codes: __m256i) -> __m256i {
        let even = _mm256_srli_epi16(self.products(codes, 0), 8);
        let odd = _mm256_and_si256(self.products(codes, 1), _mm256_set1_epi16(0x3f00));
        _mm256_or_si256(_mm256_and_si256(even, _mm256_set1_epi16(0x3f)), odd)
    }

    /// Windows of even or odd inputs times the multiplier.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn products(&self, codes: __m256i, odd: usize) -> __m256i {
        let up = self.factors[odd];
        let lower = _mm256_mullo_epi16(_mm256_shuffle_epi8(codes, self.bytes[odd]), up);
        let upper = _mm256_mullo_epi16(_mm256_shuffle_epi8(codes, self.bytes[2 + odd]), up);
        let upper = _mm256_and_si256(upper, _mm256_set1_epi16(0xff00u16 as i16));
        _mm256_mullo_epi16(_mm256_or_si256(_mm256_srli_epi16(lower, 8), upper), self.multiplier)
    }
}

/// Sixteen inputs whose windows begin at the bits `first`: eight that lie right in the word as it is, and
/// eight that do once it has been moved down.
fn narrow_order(first: &[usize; INPUTS]) -> [u8; INPUTS] {
    let must_move = |&i: &usize| first[i] % 8 > DOWN;
    let can_move = |&i: &usize| first[i] >= DOWN && (first[i] - DOWN) % 8 <= DOWN;
    let mut moved: Vec<usize> = (0..INPUTS).filter(must_move).collect();
    let free = (0..INPUTS).filter(|i| !must_move(i) && can_move(i));
    moved.extend(free.take(INPUTS / 2 - moved.len()));
    let stay = (0..INPUTS).filter(|i| !moved.contains(i));
    let order: Vec<u8> = stay.chain(moved.iter().copied()).map(|i| i as u8).collect();
    order.try_into().expect("a test has tried every rate")
}

#[target_feature(enable = "avx2")]
fn load(bytes: &[u8; 32]) -> __m256i {
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx2")]
fn lanes(lanes: &[u16; 16]) -> __m256i {
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
}

/// The four parts of a table, each but the first as its difference to the one before, for both halves of a
/// register; by the class of the lower half and twice that of the upper.
type Differences = [[[u8; 32]; 4]; CLASSES * CLASSES];

fn differences(tables: &TrellisTables) -> Differences {
    std::array::from_fn(|classes| {
        std::array::from_fn(|part| {
            std::array::from_fn(|i| {
                let table = &tables.bytes[classes >> (i / 16) & 1];
                let before = if part == 0 { 0 } else { table[part * 16 - 16 + i % 16] };
                table[part * 16 + i % 16] ^ before
            })
        })
    })
}

/// Weights of entries.
#[target_feature(enable = "avx2")]
#[inline]
fn look_up(parts: &[[u8; 32]; 4], entry: __m256i) -> __m256i {
    let part = |i: usize| -> *const __m256i { parts[i].as_ptr().cast() };
    // SAFETY: 32 bytes each.
    let [a, b, c, d] = unsafe {
        [
            _mm256_loadu_si256(part(0)),
            _mm256_loadu_si256(part(1)),
            _mm256_loadu_si256(part(2)),
            _mm256_loadu_si256(part(3)),
        ]
    };
    let a = _mm256_shuffle_epi8(a, entry);
    let b = _mm256_shuffle_epi8(b, _mm256_sub_epi8(entry, _mm256_set1_epi8(16)));
    let c = _mm256_shuffle_epi8(c, _mm256_sub_epi8(entry, _mm256_set1_epi8(32)));
    let d = _mm256_shuffle_epi8(d, _mm256_sub_epi8(entry, _mm256_set1_epi8(48)));
    _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d))
}

/// Unscaled products of a tile's rows with `V` vectors from `first` on.
#[target_feature(enable = "avx2,fma")]
fn multiply_tile<const V: usize, const WIDE: bool>(
    m: &TrellisMatrix<'_>,
    windows: &Windows,
    tables: &Differences,
    x: &Activations,
    tile: usize,
    first: usize,
) -> [[f32; TILE]; V] {
    let (rate, blocks) = (m.trellis.rate, m.cols / BLOCK);
    let lines = &m.codes[tile * m.trellis.tile_bytes(m.cols)..][..m.trellis.tile_bytes(m.cols)];
    let (high, low) = (&x.high[first * m.cols..], &x.low[first * m.cols..]);
    assert!(high.len() >= V * m.cols && low.len() >= V * m.cols);
    let (scales, sums) = (&x.scales[first * blocks..], &x.sums[first * blocks..]);
    // 2^−delta; the instruction that looks up takes three bits of an index.
    let powers = _mm256_setr_ps(1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125);

    let mut f = [_mm256_setzero_ps(); V];
    for block in 0..blocks {
        let side = m.tile_sides(tile, block);
        let bits: [usize; BLOCK / GROUP] =
            std::array::from_fn(|group| (block * (BLOCK / GROUP) + group) * rate);
        debug_assert!(bits[3] / 64 * LINE + 2 * LINE <= lines.len());
        // Rows 0 and 2, 1 and 3, 4 and 6, 5 and 7, each of the first sixteen inputs and of the others.
        let mut w = [[_mm256_setzero_si256(); 2]; 4];
        for half in 0..2 {
            let codes = |bit: usize| {
                // SAFETY: `lines` are those of the tile, and no group of inputs begins in the last.
                let (this, next) = unsafe {
                    let line = lines.as_ptr().add(bit / 64 * LINE + half * 32);
                    (_mm256_loadu_si256(line.cast()), _mm256_loadu_si256(line.add(LINE).cast()))
                };
                // A count of 64 makes zero.
                let count = _mm256_set1_epi64x((bit % 64) as i64);
                let rest = _mm256_set1_epi64x(64 - (bit % 64) as i64);
                _mm256_or_si256(_mm256_srlv_epi64(this, count), _mm256_sllv_epi64(next, rest))
            };
            let entries = |pair: usize| {
                if WIDE {
                    windows.wide_entries(codes(bits[2 * pair]), codes(bits[2 * pair + 1]))
                } else {
                    windows.narrow_entries(codes(bits[2 * pair]))
                }
            };
            let (a, b) = (entries(0), entries(1));
            for rows in 0..2 {
                let class = |row: usize| (side >> (8 * row + 3) & 1) as usize;
                let row = half * ROWS + rows;
                let parts = &tables[class(row) | class(row + 2) << 1];
                w[half * 2 + rows] = [look_up(parts, a[rows]), look_up(parts, b[rows])];
            }
        }
        // In the order of the lanes below: rows 0, 1, 4, 5, 2, 3, 6, 7.
        let nibbles = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(side as i64));
        let nibbles = _mm256_permute4x64_epi64(nibbles, 0b11_01_10_00);
        let power = _mm256_permutevar8x32_ps(powers, nibbles);
        for (v, f) in f.iter_mut().enumerate() {
            let at = v * m.cols + block * BLOCK;
            let inputs = |plane: &[i8], pair: usize| {
                // SAFETY: there are V · cols bytes of each plane, as asserted above.
                let inputs =
                    unsafe { _mm_loadu_si128(plane.as_ptr().add(at + pair * INPUTS).cast()) };
                _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(inputs), windows.order)
            };
            let high = [inputs(high, 0), inputs(high, 1)];
            let low = [inputs(low, 0), inputs(low, 1)];
            let [a, b, c, d] = w;
            let first = _mm256_hadd_epi32(dot(a, high, low), dot(b, high, low));
            let second = _mm256_hadd_epi32(dot(c, high, low), dot(d, high, low));
            let bias = _mm256_set1_epi32(i32::from(ZERO) * sums[v * blocks + block]);
            let total = _mm256_sub_epi32(_mm256_hadd_epi32(first, second), bias);
            let scale = _mm256_mul_ps(power, _mm256_set1_ps(scales[v * blocks + block]));
            *f = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, *f);
        }
    }
    let mut out = [[0.0; TILE]; V];
    for (out, f) in out.iter_mut().zip(f) {
        let mut lanes = [0.0f32; TILE];
        // SAFETY: eight values.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), f) };
        let [a, b, e, f, c, d, g, h] = lanes;
        *out = [a, b, c, d, e, f, g, h];
    }
    out
}

/// Sums of eight products each, of 32 inputs. Weights are at most 127 and low bytes at most 64, so that four
/// products of those stay within 16 bits, and two of high bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn dot(w: [__m256i; 2], high: [__m256i; 2], low: [__m256i; 2]) -> __m256i {
    let of_high =
        |i: usize| _mm256_madd_epi16(_mm256_maddubs_epi16(w[i], high[i]), _mm256_set1_epi16(128));
    let of_low = |i: usize| _mm256_maddubs_epi16(w[i], low[i]);
    let low = _mm256_madd_epi16(_mm256_add_epi16(of_low(0), of_low(1)), _mm256_set1_epi16(1));
    _mm256_add_epi32(_mm256_add_epi32(of_high(0), of_high(1)), low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_narrow_window_of_every_rate_is_within_sixteen_bits_of_a_byte() {
        for rate in 16..=SIXTEEN {
            let trellis = Trellis::new(rate, NARROW).unwrap();
            let first = std::array::from_fn(|input| trellis.first_bit(input));
            let order = narrow_order(&first);
            for (i, &input) in order.iter().enumerate() {
                let bit = first[usize::from(input)].checked_sub(i / 8 * DOWN).unwrap();
                assert!(bit % 8 + NARROW <= 16 && bit / 8 < 7, "{rate} {input}");
                // Bits that moving down brings in from above are zero and not those of the window.
                assert!(first[usize::from(input)] + NARROW <= 64, "{rate} {input}");
            }
            let mut sorted = order;
            sorted.sort_unstable();
            assert!(sorted.iter().enumerate().all(|(i, &input)| usize::from(input) == i));
        }
    }
}
