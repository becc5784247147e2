//! Matrix products of every kernel set against the specification, bit for bit: every format, at every
//! length, shape and alignment, at the ends of what scales can be, and with inputs of any kind.

use rill_kernels::{Codec, Kernels, Matrix, Vq};

/// Small, fast, seeded numbers: xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Ordinary numbers between infinities, NaN, subnormals and zeros of either sign, `rare` times
    /// less often.
    fn floats(&mut self, n: usize, rare: u64) -> Vec<f32> {
        let mut float = || {
            let bits = self.next() as u32;
            match self.next() % (12 * rare) {
                0 => f32::from_bits(bits),
                1 => f32::from_bits(bits & 0x807f_ffff),
                2 => f32::from_bits(bits & 1 << 31),
                // Within ±4, from bits that are not round.
                _ => (bits >> 8) as f32 / (1 << 21) as f32 - 4.0,
            }
        };
        (0..n).map(|_| float()).collect()
    }
}

/// A random matrix.
struct Packed {
    codec: Codec,
    rows: usize,
    cols: usize,
    codes: Shifted,
    scales: Shifted,
    tables: Vec<f32>,
}

/// Bytes at some distance from a multiple of 64.
struct Shifted {
    bytes: Vec<u8>,
    from: usize,
}

impl Shifted {
    fn new(bytes: &[u8], shift: usize) -> Self {
        // Allocators give 16; the rest is found by looking.
        let mut out: Vec<u8> = Vec::with_capacity(bytes.len() + 128);
        let from = out.as_ptr().align_offset(64) + shift;
        out.resize(from, 0);
        out.extend_from_slice(bytes);
        Self { bytes: out, from }
    }

    fn get(&self) -> &[u8] {
        &self.bytes[self.from..]
    }
}

const VQ3R: Vq = Vq { stages: 3, entries: 256, index_block: 4, packed: false };

const CODECS: [Codec; 14] = [
    Codec::F32,
    Codec::Bf16,
    Codec::Q8 { group: 16 },
    Codec::Q8 { group: 32 },
    Codec::Q8 { group: 128 },
    Codec::Q4 { group: 16 },
    Codec::Q4 { group: 48 },
    Codec::Q4 { group: 64 },
    Codec::Q4 { group: 128 },
    Codec::Mxfp4,
    Codec::Vq(VQ3R),
    Codec::Vq(Vq { stages: 2, index_block: 0, ..VQ3R }),
    Codec::Vq(Vq { stages: 1, entries: 19, index_block: 3, ..VQ3R }),
    Codec::Vq(Vq { stages: 4, entries: 64, index_block: 64, packed: true }),
];

impl Packed {
    fn random(rng: &mut Rng, codec: Codec, rows: usize, cols: usize, shift: usize) -> Self {
        let layout = codec.layout(rows, cols).expect("a shape of the format");
        let mut tables = vec![];
        let codes: Vec<u8> = match codec {
            Codec::F32 => {
                rng.floats(rows * cols, 50).iter().flat_map(|w| w.to_le_bytes()).collect()
            }
            Codec::Bf16 => {
                let weights = rng.floats(rows * cols, 50);
                weights.iter().flat_map(|w| ((w.to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            Codec::Vq(vq) => {
                tables = rng.floats(vq.stages * vq.entries * 8, 50);
                let top = if vq.packed { 256 } else { vq.entries as u64 };
                (0..layout.codes).map(|_| (rng.next() % top) as u8).collect()
            }
            _ => (0..layout.codes).map(|_| rng.next() as u8).collect(),
        };
        // Every third scale at an end of the range: the smallest and largest powers of MXFP4; zero, the
        // smallest subnormal, the largest, the smallest normal, the largest of f16, of either sign.
        let ends = [0u16, 1, 0x3ff, 0x400, 0x7bff];
        let scales: Vec<u8> = match codec {
            Codec::Mxfp4 => (0..layout.scales)
                .map(|_| match rng.next() % 6 {
                    0 => 0,
                    1 => 254,
                    _ => 120 + (rng.next() % 16) as u8,
                })
                .collect(),
            _ => (0..layout.scales / 2)
                .flat_map(|_| match rng.next() {
                    r if r % 3 == 0 => {
                        (ends[r as usize / 3 % 5] | (r >> 40) as u16 & 0x8000).to_le_bytes()
                    }
                    // Up to 1, subnormals included.
                    r => ((r >> 16) as u16 & 0xbbff).to_le_bytes(),
                })
                .collect(),
        };
        let (codes, scales) = (Shifted::new(&codes, shift), Shifted::new(&scales, shift));
        Self { codec, rows, cols, codes, scales, tables }
    }

    fn matrix(&self) -> Matrix<'_> {
        let (codes, scales) = (self.codes.get(), self.scales.get());
        Matrix::with_tables(self.codec, self.rows, self.cols, codes, scales, &self.tables)
            .expect("the lengths fit")
    }
}

/// Columns of which a format's rows are multiples.
fn step(codec: Codec) -> usize {
    match codec {
        Codec::Mxfp4 => 32,
        Codec::Vq(_) => 8,
        _ => 1,
    }
}

fn check(packed: &Packed, x: &[f32], n: usize) {
    check_matrix(&packed.matrix(), x, n);
}

/// Multiplies with every set and demands the specification's bits of each, where every vector is
/// multiplied alone.
fn check_matrix(m: &Matrix<'_>, x: &[f32], n: usize) {
    let (rows, cols) = (m.rows(), m.cols());
    let mut expected = vec![7.0; rows * n];
    Kernels::SCALAR.matmul(m, x, n, &mut expected);
    for set in Kernels::all() {
        let mut out = vec![7.0; rows * n];
        set.matmul(m, x, n, &mut out);
        for (i, (got, expected)) in out.iter().zip(&expected).enumerate() {
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(
                same,
                "{:?} ({rows}, {cols}) times {n} vectors, {}: row {}, vector {} is {got:e}, the \
                 specification says {expected:e}",
                m.codec(),
                set.name(),
                i / n,
                i % n,
            );
        }
    }
}

/// Memory that ends where the next byte must not be touched.
#[cfg(target_os = "linux")]
mod guarded {
    #![expect(unsafe_code, reason = "memory maps")]

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

    const PAGE: usize = 1 << 16;

    pub(crate) struct Guarded {
        start: *mut u8,
        mapped: usize,
        len: usize,
    }

    impl Guarded {
        pub(crate) fn new(bytes: &[u8]) -> Self {
            let (len, room) = (bytes.len(), bytes.len().next_multiple_of(PAGE));
            let mapped = room + PAGE;
            // SAFETY: a new map, of which the last page is then closed, and the bytes lie before it.
            unsafe {
                let access = ProtFlags::READ | ProtFlags::WRITE;
                let start = mmap_anonymous(std::ptr::null_mut(), mapped, access, MapFlags::PRIVATE);
                let start = start.expect("memory").cast::<u8>();
                mprotect(start.add(room).cast(), PAGE, MprotectFlags::empty()).expect("mapped");
                start.add(room - len).copy_from_nonoverlapping(bytes.as_ptr(), len);
                Self { start, mapped, len }
            }
        }

        pub(crate) fn get(&self) -> &[u8] {
            // SAFETY: the last `len` bytes before the closed page, which were written.
            unsafe {
                std::slice::from_raw_parts(self.start.add(self.mapped - PAGE - self.len), self.len)
            }
        }

        /// The bytes as f32; there must be whole ones.
        pub(crate) fn floats(&self) -> &[f32] {
            let bytes = self.get();
            // SAFETY: any bits are an f32, and they end at a page.
            unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / 4) }
        }
    }

    impl Drop for Guarded {
        fn drop(&mut self) {
            // SAFETY: the map of `new`, to which no slice outlives `self`.
            unsafe { munmap(self.start.cast(), self.mapped).expect("mapped") }
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_is_read_beyond_the_end() {
    let mut rng = Rng(55);
    for codec in CODECS {
        for cols in (step(codec)..=160).step_by(step(codec)) {
            for (rows, n) in [(1 + cols % 5, 1), (1 + cols % 9, 4 + cols % 3)] {
                let packed = Packed::random(&mut rng, codec, rows, cols, 0);
                let bytes = |floats: &[f32]| {
                    floats.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()
                };
                let x = rng.floats(n * cols, 40);
                let [codes, scales, tables, x] =
                    [packed.codes.get(), packed.scales.get(), &bytes(&packed.tables), &bytes(&x)]
                        .map(guarded::Guarded::new);
                let (codes, scales) = (codes.get(), scales.get());
                let tables = tables.floats();
                let m = Matrix::with_tables(codec, rows, cols, codes, scales, tables).unwrap();
                check_matrix(&m, x.floats(), n);
            }
        }
    }
}

#[test]
fn every_number_of_columns_gives_the_specifications_bits() {
    let mut rng = Rng(50);
    for codec in CODECS {
        for cols in (0..=300).step_by(step(codec)) {
            for (rows, n) in [(1 + cols % 9, 1), (1 + cols % 7, 2 + cols % 5)] {
                let packed = Packed::random(&mut rng, codec, rows, cols, 0);
                let x = rng.floats(n * cols, 40);
                check(&packed, &x, n);
            }
        }
    }
}

#[test]
fn every_shape_of_tiles_gives_the_specifications_bits() {
    let mut rng = Rng(51);
    for codec in CODECS {
        let cols = 96 + if step(codec) == 1 { 43 } else { 0 };
        for rows in 1..=9 {
            let packed = Packed::random(&mut rng, codec, rows, cols, 0);
            for n in [1, 2, 3, 4, 5, 7, 8, 16, 33, 64] {
                let x = rng.floats(n * cols, 100);
                check(&packed, &x, n);
            }
        }
    }
}

#[test]
fn rows_and_columns_beyond_one_panel_give_the_specifications_bits() {
    let mut rng = Rng(52);
    let long = [
        Codec::Q8 { group: 1024 },
        Codec::Q4 { group: 528 },
        Codec::Q4 { group: 48 },
        Codec::F32,
        Codec::Bf16,
        Codec::Mxfp4,
        Codec::Vq(VQ3R),
    ];
    for codec in long {
        for cols in [1024usize, 1504, 2336 + 37, 4500] {
            let cols = cols.next_multiple_of(step(codec));
            for (rows, n) in [(5, 1), (67, 2), (13, 7), (3, 35)] {
                let packed = Packed::random(&mut rng, codec, rows, cols, 0);
                // Nothing that overwhelms a sum: a long one should show every difference.
                let x: Vec<f32> = rng.floats(n * cols, 1 << 40);
                check(&packed, &x, n);
            }
        }
    }
}

#[test]
fn no_alignment_of_bytes_or_inputs_changes_a_bit() {
    let mut rng = Rng(53);
    for codec in CODECS {
        for shift in 0..64 {
            let cols = if step(codec) == 1 { 75 + shift } else { 96 };
            // f32 are never closer than four bytes apart.
            let n = 1 + shift % 5;
            let packed = Packed::random(&mut rng, codec, 5, cols, shift);
            let values = rng.floats(n * cols, 100);
            let mut x: Vec<f32> = Vec::with_capacity(n * cols + 32);
            let from = x.as_ptr().align_offset(64) + shift / 4;
            x.resize(from, 0.0);
            x.extend_from_slice(&values);
            check(&packed, &x[from..], n);
        }
    }
}

#[test]
fn sums_of_minus_zero_keep_their_sign_except_in_mxfp4() {
    // Positive weights below one, and products that round to −0 everywhere.
    for codec in [Codec::F32, Codec::Bf16] {
        for cols in 16..=100 {
            let layout = codec.layout(5, cols).unwrap();
            let codes = vec![0x3e; layout.codes];
            let m = Matrix::new(codec, 5, cols, &codes, &[]).unwrap();
            for n in [1, 5] {
                let x = vec![-1e-45; n * cols];
                let mut out = vec![0.0; 5 * n];
                Kernels::SCALAR.matmul(&m, &x, n, &mut out);
                assert!(out.iter().all(|y| *y == 0.0 && y.is_sign_negative()));
                check_matrix(&m, &x, n);
            }
        }
    }
    // A first block whose sums round to −0 when they are scaled, and more whose products are −0.
    for blocks in 1..5 {
        let cols = 32 * blocks;
        let m = Matrix::new(Codec::Mxfp4, 1, cols, &[0x22; 64][..cols / 2], &[0; 4][..blocks]);
        let m = m.unwrap();
        for n in [1, 5] {
            let input = |i| if i % cols < 32 { -1e-45 } else { -0.0 };
            let x: Vec<f32> = (0..n * cols).map(input).collect();
            let mut out = vec![0.0; n];
            Kernels::SCALAR.matmul(&m, &x, n, &mut out);
            assert!(out.iter().all(|y| y.to_bits() == 0));
            check_matrix(&m, &x, n);
        }
    }
}

#[test]
fn every_scale_of_sixteen_bits_has_its_value() {
    // A row of one group after another, each code 1, each input picked by a vector of its own.
    const GROUPS: usize = 64;
    let all: Vec<u16> = (0..=u16::MAX).filter(|bits| bits & 0x7c00 != 0x7c00).collect();
    for some in all.chunks(GROUPS) {
        let cols = 16 * some.len();
        let scales: Vec<u8> = some.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let codes = vec![1u8; cols];
        let m = Matrix::new(Codec::Q8 { group: 16 }, 1, cols, &codes, &scales).unwrap();
        let mut x = vec![0.0; cols];
        for set in Kernels::all() {
            for (g, &bits) in some.iter().enumerate() {
                x[16 * g] = 1.0;
                let mut out = [0.0];
                set.matmul(&m, &x, 1, &mut out);
                x[16 * g] = 0.0;
                let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
                let magnitude = match exponent {
                    0 => fraction * 2f32.powi(-24),
                    _ => (1.0 + fraction / 1024.0) * 2f32.powi(exponent - 15),
                };
                assert_eq!(out[0].abs(), magnitude, "{bits:#06x} ({})", set.name());
                assert!(magnitude == 0.0 || (out[0] < 0.0) == (bits >> 15 == 1), "{bits:#06x}");
            }
        }
    }
}
