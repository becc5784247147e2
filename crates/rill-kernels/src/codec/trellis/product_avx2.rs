//! Products in 256-bit vectors: a register is one row in each half, sixteen inputs.
//!
//! The plain algorithm is [`TrellisMatrix::multiply`]. There is no shift of 16-bit lanes by counts of their
//! own, but a product shifts up. The sixteen bits from some byte on hold a window of twelve if it
//! begins in one of their lowest five bits; where it does not, the word moved down by four bits has it. So a
//! window costs a shuffle of bytes, a mask, and one multiplication that brings it to the top and hashes it.
//! Wider windows are put together from two pieces. A register then has the class of one row in a
//! half, whose magnitudes are two byte shuffles of sixteen, the second of which gives zero for the small ones and
//! else the difference, so that XOR makes the magnitude: no selections. For one vector its inputs get the signs of
//! the weights, so that magnitudes need no bias; for several the weights get a bias once, and products of it are taken
//! off per block.
//!
//! Instructions for 64 weights of one vector, widths up to 12: 3 for the codes, 19 for the entries, 10 for the
//! tables, 13 for the signs and sums, 5 to bring inputs and end a block: 50, of which three can run at once.
#![expect(unsafe_code, reason = "vector loads and stores")]

use std::arch::x86_64::*;

use super::{
    Activations, BLOCK, CLASSES, GROUP, LINE, TILE, Trellis, TrellisMatrix, TrellisTables,
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
/// What weights are increased by, where they must not be below 0.
const BIAS: i32 = 64;
/// Bits that a word is moved down by for the windows that cross a byte too late.
const DOWN: usize = 4;

/// Rows in the order in which sums come out.
const ROW_ORDER: [u8; TILE] = [0, 1, 4, 5, 2, 3, 6, 7];

/// Counts of bits, because a register is filled from memory at no cost.
static COUNTS: [i64; 65] = {
    let mut counts = [0; 65];
    let mut i = 0;
    while i < 65 {
        counts[i] = i as i64;
        i += 1;
    }
    counts
};

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
    let (n, tables) = (m.check(x, out), magnitudes(&m.tables));
    for tile in 0..m.rows.div_ceil(TILE) {
        let lines = &m.codes[tile * m.trellis.tile_bytes(m.cols)..];
        let lines = &lines[..m.trellis.tile_bytes(m.cols)];
        let sides = &m.sides[tile * m.trellis.side_bytes(m.cols)..];
        let sides = sides[..m.trellis.side_bytes(m.cols)].as_chunks().0;
        let of_tile = Tile::<WIDE> { m, windows, tables: &tables, lines, sides };
        let mut v = 0;
        while v < n {
            if n - v >= MANY {
                put(m, tile, v, n, &of_tile.multiply_many(x, v), out);
                v += MANY;
            } else {
                put(m, tile, v, n, &[of_tile.multiply_one(x, v)], out);
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

/// Weights of sixteen inputs of two rows.
#[derive(Clone, Copy)]
struct Weights {
    /// Their signs; where they are 0, so is the weight.
    entries: __m256i,
    magnitudes: __m256i,
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
    /// Which row's side is in each double word, in the order in which sums come out.
    rows: __m256i,
    /// The same number in every word (128, 1) and in every byte (16, 64). Compilers that know a number make it
    /// anew from a smaller one, which takes an instruction.
    high_unit: __m256i,
    one: __m256i,
    sixteen: __m256i,
    bias: __m256i,
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
        Self {
            bytes: bytes.map(|b| load(&b)),
            masks: masks.map(|m| lanes(&m)),
            factors: factors.map(|f| lanes(&f)),
            multiplier: _mm256_setzero_si256(),
            order: load(&both(order)),
            rows: load(&std::array::from_fn(|i| if i % 4 == 0 { ROW_ORDER[i / 4] } else { 0x80 })),
            high_unit: _mm256_set1_epi16(128),
            one: _mm256_set1_epi16(1),
            sixteen: _mm256_set1_epi8(16),
            bias: _mm256_set1_epi8(BIAS as i8),
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
        let order: [u8; INPUTS] = std::array::from_fn(|i| i as u8);
        Self {
            bytes: bytes.map(|b| load(&b)),
            masks: [_mm256_setzero_si256(); 2],
            factors: factors.map(|f| lanes(&f)),
            multiplier: _mm256_set1_epi16((trellis.multiplier() << 2) as i16),
            order: load(&both(order)),
            rows: load(&std::array::from_fn(|i| if i % 4 == 0 { ROW_ORDER[i / 4] } else { 0x80 })),
            high_unit: _mm256_set1_epi16(128),
            one: _mm256_set1_epi16(1),
            sixteen: _mm256_set1_epi8(16),
            bias: _mm256_set1_epi8(BIAS as i8),
        }
    }

    /// Entries of rows 0 and 2, then 1 and 3, of sixteen inputs whose codes `codes` begins with.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn narrow_entries(&self, codes: __m256i) -> [__m256i; 2] {
        let down = _mm256_srli_epi64(codes, DOWN as i32);
        let of = |bytes: __m256i, set: usize, codes: __m256i| {
            let window = _mm256_and_si256(_mm256_shuffle_epi8(codes, bytes), self.masks[set]);
            _mm256_srai_epi16(_mm256_mullo_epi16(window, self.factors[set]), 10)
        };
        let [a, b, c, d] = self.bytes;
        [
            _mm256_packs_epi16(of(a, 0, codes), of(b, 1, down)),
            _mm256_packs_epi16(of(c, 0, codes), of(d, 1, down)),
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
        let even = _mm256_srai_epi16(self.products(codes, 0), 10);
        let odd = _mm256_srai_epi16(self.products(codes, 1), 2);
        let high_bytes = _mm256_set1_epi16(0xff00u16 as i16);
        _mm256_or_si256(_mm256_andnot_si256(high_bytes, even), _mm256_and_si256(high_bytes, odd))
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

    /// Weights of entries. An index of which bit 7 is set finds 0, and else four bits of it count.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn look_up(&self, parts: &[[u8; 32]; 2], entries: __m256i) -> Weights {
        let index = _mm256_abs_epi8(entries);
        let small = _mm256_shuffle_epi8(load(&parts[0]), index);
        let more = _mm256_shuffle_epi8(load(&parts[1]), _mm256_sub_epi8(index, self.sixteen));
        Weights { entries, magnitudes: _mm256_xor_si256(small, more) }
    }

    /// Sums of eight products each, of 32 inputs that get the signs of their weights. Magnitudes are at most
    /// 63 and bytes of inputs 127, so that four products stay within 16 bits.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn dot(&self, [a, b]: [Weights; 2], [high_a, high_b, low_a, low_b]: &[__m256i; 4]) -> __m256i {
        let pairs = |w: Weights, x: __m256i| {
            _mm256_maddubs_epi16(w.magnitudes, _mm256_sign_epi8(x, w.entries))
        };
        let high = _mm256_add_epi16(pairs(a, *high_a), pairs(b, *high_b));
        let low = _mm256_add_epi16(pairs(a, *low_a), pairs(b, *low_b));
        _mm256_add_epi32(_mm256_madd_epi16(high, self.high_unit), _mm256_madd_epi16(low, self.one))
    }

    /// Inputs of a block, for both halves of a register: of the first sixteen and the others the upper bytes, then the
    /// lower ones.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn inputs(&self, high: &[i8; BLOCK], low: &[i8; BLOCK]) -> [__m256i; 4] {
        let mut inputs = [_mm256_setzero_si256(); 4];
        for (i, inputs) in inputs.iter_mut().enumerate() {
            let plane = if i < 2 { high } else { low };
            // SAFETY: a plane has twice sixteen bytes.
            let bytes = unsafe { _mm_loadu_si128(plane.as_ptr().add(i % 2 * INPUTS).cast()) };
            *inputs = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), self.order);
        }
        inputs
    }

    /// 2^−delta of a block's rows, in the order of `ROW_ORDER`.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn powers(&self, sides: &[u8; TILE], block: usize) -> __m256 {
        // SAFETY: eight bytes.
        let sides = unsafe { _mm_loadl_epi64(sides.as_ptr().cast()) };
        let sides = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(sides), self.rows);
        let odd = _mm256_set1_epi64x(COUNTS[block % 2 * 4]);
        let nibbles = _mm256_srlv_epi64(sides, odd);
        // The instruction takes three bits of an index.
        let powers = _mm256_setr_ps(1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125);
        _mm256_permutevar8x32_ps(powers, nibbles)
    }

    /// Weights plus 64, as bytes without a sign.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn biased(&self, w: Weights) -> __m256i {
        _mm256_add_epi8(_mm256_sign_epi8(w.magnitudes, w.entries), self.bias)
    }

    /// The same of weights with their bias, for several vectors. Two products of the upper bytes stay within 16
    /// bits, and four of the lower ones.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn dot_biased(
        &self,
        [a, b]: [__m256i; 2],
        [high_a, high_b, low_a, low_b]: &[__m256i; 4],
    ) -> __m256i {
        let of_high =
            |w: __m256i, x: __m256i| _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), self.high_unit);
        let high = _mm256_add_epi32(of_high(a, *high_a), of_high(b, *high_b));
        let low =
            _mm256_add_epi16(_mm256_maddubs_epi16(a, *low_a), _mm256_maddubs_epi16(b, *low_b));
        _mm256_add_epi32(high, _mm256_madd_epi16(low, self.one))
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

/// The same in both halves.
fn both(half: [u8; INPUTS]) -> [u8; 32] {
    std::array::from_fn(|i| half[i % INPUTS])
}

#[target_feature(enable = "avx2")]
fn lanes(lanes: &[u16; 16]) -> __m256i {
    // SAFETY: 32 bytes.
    unsafe { _mm256_loadu_si256(lanes.as_ptr().cast()) }
}

/// The magnitudes below 16, and what those from there on differ from them in, for both halves of a
/// register; by the class of the lower half and twice that of the upper.
type Magnitudes = [[[u8; 32]; 2]; CLASSES * CLASSES];

fn magnitudes(tables: &TrellisTables) -> Magnitudes {
    std::array::from_fn(|classes| {
        let of = |i: usize| &tables.magnitudes[classes >> (i / 16) & 1];
        [
            std::array::from_fn(|i| of(i)[i % 16]),
            std::array::from_fn(|i| of(i)[i % 16] ^ of(i)[i % 16 + 16]),
        ]
    })
}

/// A tile of rows and what its codes become weights with.
struct Tile<'a, const WIDE: bool> {
    m: &'a TrellisMatrix<'a>,
    windows: &'a Windows,
    tables: &'a Magnitudes,
    lines: &'a [u8],
    sides: &'a [[u8; TILE]],
}

impl<const WIDE: bool> Tile<'_, WIDE> {
    /// Unscaled products of the rows with a vector.
    #[target_feature(enable = "avx2,fma")]
    fn multiply_one(&self, x: &Activations, v: usize) -> [f32; TILE] {
        let [high, low] = planes(x, v);
        let scales = &x.scales[v * high.len()..];
        let mut f = _mm256_setzero_ps();
        for (block, ((high, low), &scale)) in high.iter().zip(low).zip(scales).enumerate() {
            let sides = self.sides(block);
            let classes = classes(sides, block);
            let inputs = self.windows.inputs(high, low);
            let mut sums = [_mm256_setzero_si256(); 4];
            for half in 0..2 {
                let (a, b) = (self.entries(block, half, 0), self.entries(block, half, 1));
                for rows in 0..2 {
                    let parts = self.parts(classes, half * ROWS + rows);
                    let w = [
                        self.windows.look_up(parts, a[rows]),
                        self.windows.look_up(parts, b[rows]),
                    ];
                    sums[half * 2 + rows] = self.windows.dot(w, &inputs);
                }
            }
            let scale = _mm256_mul_ps(self.windows.powers(sides, block), _mm256_set1_ps(scale));
            f = _mm256_fmadd_ps(_mm256_cvtepi32_ps(joined(sums)), scale, f);
        }
        in_order(f)
    }

    /// Unscaled products of the rows with several vectors from `first` on.
    #[target_feature(enable = "avx2,fma")]
    fn multiply_many(&self, x: &Activations, first: usize) -> [[f32; TILE]; MANY] {
        let blocks = self.m.cols / BLOCK;
        let scales = &x.scales[first * blocks..][..MANY * blocks];
        let biases = &x.sums[first * blocks..][..MANY * blocks];
        let mut planes_of = [planes(x, first); MANY];
        for (v, planes_of) in planes_of.iter_mut().enumerate() {
            *planes_of = planes(x, first + v);
        }
        let mut f = [_mm256_setzero_ps(); MANY];
        for block in 0..blocks {
            let sides = self.sides(block);
            let classes = classes(sides, block);
            let mut w = [[_mm256_setzero_si256(); 2]; 4];
            for half in 0..2 {
                let (a, b) = (self.entries(block, half, 0), self.entries(block, half, 1));
                for rows in 0..2 {
                    let parts = self.parts(classes, half * ROWS + rows);
                    w[half * 2 + rows] = [
                        self.windows.biased(self.windows.look_up(parts, a[rows])),
                        self.windows.biased(self.windows.look_up(parts, b[rows])),
                    ];
                }
            }
            let powers = self.windows.powers(sides, block);
            for (v, f) in f.iter_mut().enumerate() {
                let [high, low] = planes_of[v];
                let inputs = self.windows.inputs(&high[block], &low[block]);
                let mut sums = [_mm256_setzero_si256(); 4];
                for (sum, &w) in sums.iter_mut().zip(&w) {
                    *sum = self.windows.dot_biased(w, &inputs);
                }
                let bias = _mm256_set1_epi32(BIAS * biases[v * blocks + block]);
                let total = _mm256_sub_epi32(joined(sums), bias);
                let scale = _mm256_mul_ps(powers, _mm256_set1_ps(scales[v * blocks + block]));
                *f = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), scale, *f);
            }
        }
        let mut out = [[0.0; TILE]; MANY];
        for (out, f) in out.iter_mut().zip(f) {
            *out = in_order(f);
        }
        out
    }

    /// Side nibbles of a block and its neighbour; zeros where there are none.
    #[inline]
    fn sides(&self, block: usize) -> &[u8; TILE] {
        self.sides.get(block / 2).unwrap_or(&[0; TILE])
    }

    /// Tables of a row and the one after the next.
    #[inline]
    fn parts(&self, classes: u64, row: usize) -> &[[u8; 32]; 2] {
        &self.tables[(classes >> (8 * row) & 3) as usize]
    }

    /// Entries of rows 0 and 2, then 1 and 3, of half the rows; of the first or the second sixteen inputs of a block.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn entries(&self, block: usize, half: usize, pair: usize) -> [__m256i; 2] {
        let group = block * (BLOCK / GROUP) + 2 * pair;
        if WIDE {
            self.windows.wide_entries(self.codes(group, half), self.codes(group + 1, half))
        } else {
            self.windows.narrow_entries(self.codes(group, half))
        }
    }

    /// Words of half the rows that begin with the codes of a group of inputs.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn codes(&self, group: usize, half: usize) -> __m256i {
        let bit = group * self.m.trellis.rate;
        debug_assert!(bit / 64 * LINE + 2 * LINE <= self.lines.len());
        // SAFETY: `lines` are those of the tile, groups are those of its columns, and none begins in the last line.
        let (this, next) = unsafe {
            let line = self.lines.as_ptr().add(bit / 64 * LINE + half * 32);
            (_mm256_loadu_si256(line.cast()), _mm256_loadu_si256(line.add(LINE).cast()))
        };
        // A count of 64 makes zero.
        let count = _mm256_set1_epi64x(COUNTS[bit % 64]);
        let rest = _mm256_set1_epi64x(COUNTS[64 - bit % 64]);
        _mm256_or_si256(_mm256_srlv_epi64(this, count), _mm256_sllv_epi64(next, rest))
    }
}

/// Classes of a block's rows: byte r has that of row r in bit 0, that of row r + 2 in bit 1.
#[inline]
fn classes(sides: &[u8; TILE], block: usize) -> u64 {
    let classes = u64::from_le_bytes(*sides) >> (block % 2 * 4 + 3) & 0x0101_0101_0101_0101;
    classes | classes >> 15
}

/// The upper and the lower bytes of a vector, by blocks.
#[inline]
fn planes(x: &Activations, v: usize) -> [&[[i8; BLOCK]]; 2] {
    let inputs = v * x.cols..(v + 1) * x.cols;
    [x.high[inputs.clone()].as_chunks().0, x.low[inputs].as_chunks().0]
}

/// Sums over the halves of four registers, in the order of `ROW_ORDER`.
#[target_feature(enable = "avx2")]
#[inline]
fn joined([a, b, c, d]: [__m256i; 4]) -> __m256i {
    _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d))
}

/// Lanes in the order of the rows.
#[target_feature(enable = "avx2")]
fn in_order(f: __m256) -> [f32; TILE] {
    let (mut lanes, mut out) = ([0.0f32; TILE], [0.0; TILE]);
    // SAFETY: eight values.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), f) };
    for (lane, row) in lanes.into_iter().zip(ROW_ORDER) {
        out[usize::from(row)] = lane;
    }
    out
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
