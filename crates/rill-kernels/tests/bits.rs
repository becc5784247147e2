//! Every kernel set against the specification, bit for bit, and the specification against
//! binary64.

use proptest::prelude::*;
use rill_kernels::{
    Codec, Kernels, LatentCache, LatentFormat, Latents, Matrix, Pool, Vq, math, ulp_error,
};

/// Small, fast, seeded numbers: xorshift64*.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform in ±1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn vec(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }

    /// Any bit pattern: infinities, NaN and subnormals among ordinary values.
    fn wild(&mut self, n: usize) -> Vec<f32> {
        (0..n)
            .map(|_| match self.next() % 12 {
                0 => f32::from_bits(self.next() as u32),
                1 => f32::from_bits(self.next() as u32 & 0x807f_ffff),
                _ => self.unit() * 4.0,
            })
            .collect()
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

fn same_bits(what: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        assert!(same, "{what}: element {i} is {a:e}, the specification says {b:e}");
    }
}

/// Runs `f` with every kernel set, demands the specification's bits from each, returns them.
fn every_set(what: &str, f: impl Fn(&Kernels) -> Vec<f32>) -> Vec<f32> {
    let reference = f(&Kernels::SCALAR);
    for set in Kernels::all() {
        same_bits(&format!("{what} ({})", set.name()), &f(&set), &reference);
    }
    reference
}

fn close(what: &str, got: f32, exact: f64, scale: f64, tolerance: f64) {
    let error = (f64::from(got) - exact).abs();
    assert!(error <= tolerance * scale, "{what}: {got:e}, exactly {exact:e}, error {error:e}");
}

/// A random matrix in one of the formats.
struct Packed {
    codec: Codec,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
    tables: Vec<f32>,
}

const VQ3R: Vq = Vq { stages: 3, entries: 256, index_block: 4, packed: false };

const CODECS: [Codec; 9] = [
    Codec::F32,
    Codec::Bf16,
    Codec::Q8 { group: 32 },
    Codec::Q8 { group: 128 },
    Codec::Q4 { group: 64 },
    Codec::Mxfp4,
    Codec::Vq(VQ3R),
    Codec::Vq(Vq { stages: 2, index_block: 0, ..VQ3R }),
    Codec::Vq(Vq { stages: 4, entries: 64, index_block: 64, packed: true }),
];

impl Packed {
    fn random(rng: &mut Rng, codec: Codec, rows: usize, cols: usize) -> Self {
        let layout = codec.layout(rows, cols).expect("a shape of the format");
        let n = rows * cols;
        let mut tables = vec![];
        let codes = match codec {
            Codec::F32 => rng.vec(n).iter().flat_map(|w| w.to_le_bytes()).collect(),
            Codec::Bf16 => {
                let values = rng.vec(n);
                let bf16 = values.iter().flat_map(|w| ((w.to_bits() >> 16) as u16).to_le_bytes());
                bf16.collect()
            }
            Codec::Vq(vq) => {
                tables = rng.vec(vq.stages * vq.entries * 8);
                rng.bytes(layout.codes)
            }
            _ => rng.bytes(layout.codes),
        };
        let scales = match codec {
            Codec::Mxfp4 => rng.bytes(layout.scales).iter().map(|b| 118 + b % 8).collect(),
            // f16 of either sign, subnormals included, none above 1.
            _ => (0..layout.scales / 2)
                .flat_map(|_| ((rng.next() as u16) & 0xbbff).to_le_bytes())
                .collect(),
        };
        Self { codec, rows, cols, codes, scales, tables }
    }

    fn matrix(&self) -> Matrix<'_> {
        self.over(&self.codes, &self.scales)
    }

    fn over<'a>(&'a self, codes: &'a [u8], scales: &'a [u8]) -> Matrix<'a> {
        Matrix::with_tables(self.codec, self.rows, self.cols, codes, scales, &self.tables)
            .expect("the lengths fit")
    }

    /// The exact weight, decoded without the crate's help.
    fn weight(&self, row: usize, col: usize) -> f64 {
        let at = row * self.cols + col;
        let b = &self.codes;
        let f16_scale = |i: usize| {
            let bits = u16::from_le_bytes([self.scales[2 * i], self.scales[2 * i + 1]]);
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
            let magnitude = match exponent {
                0 => fraction * 2f64.powi(-24),
                _ => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
            };
            if bits >> 15 == 1 { -magnitude } else { magnitude }
        };
        let nibble = |low: bool, byte: u8| if low { byte & 15 } else { byte >> 4 };
        match self.codec {
            Codec::F32 => {
                f64::from(f32::from_le_bytes(b[4 * at..4 * at + 4].try_into().expect("four bytes")))
            }
            Codec::Bf16 => {
                let bits = u16::from_le_bytes([b[2 * at], b[2 * at + 1]]);
                f64::from(f32::from_bits(u32::from(bits) << 16))
            }
            Codec::Q8 { group } => {
                let groups = self.cols.div_ceil(group);
                f64::from(b[at] as i8) * f16_scale(row * groups + col / group)
            }
            Codec::Q4 { group } => {
                let groups = self.cols.div_ceil(group);
                let byte = b[row * self.cols.div_ceil(2) + col / 2];
                let code = f64::from(nibble(col.is_multiple_of(2), byte)) - 8.0;
                code * f16_scale(row * groups + col / group)
            }
            Codec::Mxfp4 => {
                let nibble = nibble(col.is_multiple_of(2), b[at / 2]);
                let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(nibble & 7)];
                let sign = if nibble & 8 == 0 { 1.0 } else { -1.0 };
                sign * magnitude * 2f64.powi(i32::from(self.scales[at / 32]) - 127)
            }
            Codec::Trellis(_) | Codec::Mxfp4z => unreachable!("have tests of their own"),
            Codec::Vq(vq) => {
                let (vectors, v) = (self.cols / 8, col / 8);
                let place = match vq.index_block {
                    0 => row * vectors + v,
                    block => (row / block * vectors + v) * block + row % block,
                };
                let index = |s: usize| match vq.packed {
                    false => usize::from(b[place * vq.stages + s]),
                    true => {
                        let b = &b[place * 3..place * 3 + 3];
                        usize::from(match s {
                            0 => b[0] & 63,
                            1 => b[0] >> 6 | (b[1] & 15) << 2,
                            2 => b[1] >> 4 | (b[2] & 3) << 4,
                            _ => b[2] >> 2,
                        })
                    }
                };
                let entry = |s| f64::from(self.tables[(s * vq.entries + index(s)) * 8 + col % 8]);
                (0..vq.stages).map(entry).sum::<f64>() * f16_scale(row)
            }
        }
    }
}

#[test]
fn dot_and_sum_agree_on_every_length_up_to_300() {
    let mut rng = Rng(1);
    for n in 0..=300 {
        let (w, x) = (rng.vec(n), rng.vec(n));
        let got = every_set(&format!("dot of {n}"), |k| vec![k.dot(&w, &x), k.sum(&x)]);
        let exact: f64 = w.iter().zip(&x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
        close("dot", got[0], exact, 1.0 + n as f64, 1e-6);
        close("sum", got[1], x.iter().map(|&x| f64::from(x)).sum(), 1.0 + n as f64, 1e-6);
        let (w, x) = (rng.wild(n), rng.wild(n));
        every_set(&format!("wild dot of {n}"), |k| vec![k.dot(&w, &x), k.sum(&x)]);
    }
}

#[test]
fn dot_uses_sixteen_partial_sums_and_the_written_tree() {
    // Independent of the kernels' code: the definition of docs/arithmetic.md, by index.
    let mut rng = Rng(2);
    for n in 0..=300 {
        let (w, x) = (rng.vec(n), rng.vec(n));
        let mut p = [0.0f32; 16];
        for i in 0..n {
            p[i % 16] = w[i].mul_add(x[i], p[i % 16]);
        }
        let a: Vec<f32> = (0..8).map(|j| p[j] + p[j + 8]).collect();
        let b: Vec<f32> = (0..4).map(|j| a[j] + a[j + 4]).collect();
        let expected = (b[0] + b[2]) + (b[1] + b[3]);
        same_bits("dot", &[Kernels::SCALAR.dot(&w, &x)], &[expected]);
    }
}

#[test]
fn matrices_agree_on_every_format_and_alignment_and_with_binary64() {
    let mut rng = Rng(3);
    for codec in CODECS {
        for cols in [32, 64, 96, 160, 288] {
            let any = !matches!(codec, Codec::Mxfp4 | Codec::Vq(_));
            let cols = if any { cols + rng.next() as usize % 19 } else { cols };
            let rows = 1 + rng.next() as usize % 9;
            let packed = Packed::random(&mut rng, codec, rows, cols);
            let x = rng.vec(3 * cols);
            let got = every_set("matmul", |k| {
                let mut out = vec![0.0; rows * 3];
                k.matmul(&packed.matrix(), &x, 3, &mut out);
                out
            });
            for (i, got) in got.iter().enumerate() {
                let terms =
                    (0..cols).map(|c| packed.weight(i / 3, c) * f64::from(x[i % 3 * cols + c]));
                let scale: f64 = terms.clone().map(f64::abs).sum();
                close("matmul", *got, terms.sum(), scale, 3e-7);
            }
            // Moving the bytes changes no bits.
            for shift in 1..4 {
                let moved = |b: &[u8]| [vec![0; shift], b.to_vec()].concat();
                let (data, scales) = (moved(&packed.codes), moved(&packed.scales));
                let mut out = vec![0.0; rows * 3];
                let m = packed.over(&data[shift..], &scales[shift..]);
                Kernels::detect().matmul(&m, &x, 3, &mut out);
                same_bits("shifted", &out, &got);
            }
        }
    }
}

#[test]
fn every_length_and_tile_gives_the_specifications_bits() {
    let mut rng = Rng(40);
    for codec in CODECS {
        let step = match codec {
            Codec::Mxfp4 => 32,
            Codec::Vq(_) => 8,
            _ => 1,
        };
        for cols in (step..=300).step_by(step) {
            // One row, whole tiles of four, and rows left over; likewise for vectors.
            let (rows, n) = (1 + cols % 9, [1, 2, 4, 5, 9][cols / step % 5]);
            let packed = Packed::random(&mut rng, codec, rows, cols);
            let x = rng.wild(n * cols);
            every_set(&format!("{codec:?} ({rows}, {cols}) times {n}"), |k| {
                let mut out = vec![0.0; rows * n];
                k.matmul(&packed.matrix(), &x, n, &mut out);
                out
            });
        }
    }
}

#[test]
fn many_vectors_get_the_bits_each_gets_alone() {
    let mut rng = Rng(4);
    for codec in CODECS {
        let (rows, cols, n) = (7, 96, 64);
        let packed = Packed::random(&mut rng, codec, rows, cols);
        let x = rng.wild(n * cols);
        let kernels = Kernels::detect();
        let mut together = vec![0.0; rows * n];
        kernels.matmul(&packed.matrix(), &x, n, &mut together);
        for t in 0..n {
            let mut alone = vec![0.0; rows];
            kernels.matmul(&packed.matrix(), &x[t * cols..][..cols], 1, &mut alone);
            let column: Vec<f32> = (0..rows).map(|r| together[r * n + t]).collect();
            same_bits("one of many", &column, &alone);
        }
    }
}

#[test]
fn every_nibble_and_scale_means_its_published_value() {
    let expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let codes: Vec<u8> = (0..16).map(|i| (i % 8 * 2) | (i % 8 * 2 + 1) << 4).collect();
    for e in 0..255u8 {
        let mut row = [0.0f32; 32];
        Matrix::new(Codec::Mxfp4, 1, 32, &codes, &[e]).unwrap().decode_row(0, &mut row);
        for (i, w) in row.iter().enumerate() {
            let exact = expected[i % 8] * 2f64.powi(i32::from(e) - 127);
            assert_eq!(f64::from(w.abs()), f64::from(exact as f32), "code {i}, scale {e}");
            assert_eq!(w.is_sign_negative(), i % 16 >= 8);
        }
    }
}

#[test]
fn decoded_rows_are_the_exact_weights_rounded_once() {
    let mut rng = Rng(12);
    for codec in CODECS {
        let packed = Packed::random(&mut rng, codec, 5, 160);
        let mut row = vec![0.0; 160];
        for r in 0..5 {
            packed.matrix().decode_row(r, &mut row);
            for (c, w) in row.iter().enumerate() {
                let exact = packed.weight(r, c);
                // Sums of table entries round once for each stage.
                close("weight", *w, exact, exact.abs() + 1e-3, 2e-7);
            }
        }
    }
}

#[test]
fn the_low_nibble_is_the_even_input() {
    // Only positions can tell the order: one weight at a time, at every input.
    for input in 0..32 {
        let mut packed = [0u8; 16];
        packed[input / 2] = 2 << (4 * (input % 2));
        let m = Matrix::new(Codec::Mxfp4, 1, 32, &packed, &[127]).unwrap();
        let x: Vec<f32> = (0..32).map(|i| 100.0 + i as f32).collect();
        let mut out = [0.0];
        Kernels::detect().matmul(&m, &x, 1, &mut out);
        assert_eq!(out[0], 100.0 + input as f32);
    }
}

#[test]
fn a_subnormal_mxfp4_scale_is_not_flushed() {
    let m = Matrix::new(Codec::Mxfp4, 1, 32, &[0x22; 16], &[0]).unwrap();
    let mut out = [0.0];
    Kernels::detect().matmul(&m, &[1.0; 32], 1, &mut out);
    assert_eq!(out[0], 32.0 * 2f32.powi(-127));
}

#[test]
fn bytes_that_are_not_the_matrix_are_refused() {
    let vq = |codes: &[u8], scales: &[u8], entries: usize, tables: usize| {
        let codec = Codec::Vq(Vq { stages: 2, entries, index_block: 0, packed: false });
        Matrix::with_tables(codec, 1, 8, codes, scales, &vec![0.0; tables]).map(|_| ())
    };
    let plain = |codec, rows, cols, codes: &[u8], scales: &[u8]| {
        Matrix::new(codec, rows, cols, codes, scales).map(|_| ())
    };
    let q4 = Codec::Q4 { group: 32 };
    let cases = [
        (plain(Codec::F32, 2, 3, &[0; 23], &[]), "takes 24 bytes of codes, found 23"),
        (plain(Codec::Bf16, 2, 3, &[0; 13], &[]), "found 13"),
        (plain(Codec::Bf16, 2, 3, &[0; 12], &[0]), "0 bytes of scales, found 1"),
        (plain(Codec::Bf16, usize::MAX, 3, &[], &[]), "too large"),
        (plain(Codec::Mxfp4, 1, 33, &[0; 16], &[0]), "33 columns"),
        (plain(Codec::Mxfp4, 1, 32, &[0; 15], &[0]), "16 bytes of codes"),
        (plain(Codec::Mxfp4, 1, 32, &[0; 16], &[]), "1 bytes of scales"),
        (plain(Codec::Mxfp4, 2, 64, &[0; 64], &[1, 2, 3, 255]), "row 1, inputs from 32 on, is NaN"),
        (plain(q4, 1, 33, &[0; 17], &[0, 0]), "4 bytes of scales"),
        (plain(q4, 1, 33, &[0; 17], &[0, 0, 0, 0x7c]), "row 0, inputs from 32 on, is inf"),
        (plain(Codec::Q8 { group: 32 }, 2, 8, &[0; 16], &[0, 0, 1, 0xfe]), "row 1"),
        (plain(Codec::Q8 { group: 24 }, 1, 8, &[0; 8], &[0; 2]), "groups of 24"),
        (plain(Codec::Q8 { group: 0 }, 1, 8, &[0; 8], &[0; 2]), "groups of 0"),
        (plain(Codec::Vq(VQ3R), 1, 8, &[], &[]), "needs its tables"),
        (vq(&[0, 0], &[0, 0], 256, 4095), "tables"),
        (vq(&[0, 200], &[0, 0], 200, 3200), "byte 1 of the indices is 200"),
        (vq(&[0, 0], &[0, 0x7c], 256, 4096), "row 0"),
        (vq(&[0, 0], &[0, 0], 257, 4112), "up to 256 entries"),
    ];
    for (result, message) in cases {
        let error = result.expect_err(message).to_string();
        assert!(error.contains(message), "{error:?} does not say {message:?}");
    }
}

#[test]
fn row_ranges_are_the_rows() {
    let mut rng = Rng(5);
    for codec in CODECS {
        let packed = Packed::random(&mut rng, codec, 9, 64);
        let x = rng.vec(64);
        let mut whole = vec![0.0; 9];
        Kernels::detect().matmul(&packed.matrix(), &x, 1, &mut whole);
        let mut part = vec![0.0; 4];
        Kernels::detect().matmul(&packed.matrix().row_range(3..7), &x, 1, &mut part);
        same_bits("rows 3..7", &part, &whole[3..7]);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let mut rng = Rng(6);
    let (rows, cols) = (301, 256);
    let packed = Packed::random(&mut rng, Codec::Bf16, rows, cols);
    let m = packed.matrix();
    let x = rng.vec(cols);
    let mut alone = vec![0.0; rows];
    Kernels::detect().matmul(&m, &x, 1, &mut alone);
    for threads in [1, 2, 3, 5, 16] {
        let pool = Pool::new(threads, &[]).unwrap();
        let mut out = vec![0.0; rows];
        pool.rows(rows, rows * cols, &mut out, |range, out| {
            Kernels::detect().matmul(&m.row_range(range), &x, 1, out);
        });
        same_bits("threads", &out, &alone);
    }
}

#[test]
fn columns_are_the_transposed_product() {
    let mut rng = Rng(7);
    for codec in CODECS {
        for cols in [1, 8, 33, 128] {
            let rows = 24;
            if codec.layout(rows, cols).is_err() {
                continue;
            }
            let packed = Packed::random(&mut rng, codec, rows, cols);
            let a = rng.vec(rows);
            let got = every_set("columns", |k| {
                let mut out = vec![7.0; cols];
                k.columns(&packed.matrix(), &a, &mut out);
                out
            });
            for (c, got) in got.iter().enumerate() {
                let exact = (0..rows).map(|r| packed.weight(r, c) * f64::from(a[r])).sum();
                close("columns", *got, exact, rows as f64, 1e-6);
            }
        }
    }
}

#[test]
fn columns_agree_on_every_length_and_alignment() {
    let mut rng = Rng(41);
    for codec in CODECS {
        for cols in 1..=300 {
            // Fewer rows than are taken together, some left over, none.
            let rows = [1, 3, 4, 5, 8, 21][cols % 6];
            if codec.layout(rows, cols).is_err() {
                continue;
            }
            let packed = Packed::random(&mut rng, codec, rows, cols);
            let shift = cols % 5;
            let moved = |b: &[u8]| [vec![0; shift], b.to_vec()].concat();
            let (codes, scales) = (moved(&packed.codes), moved(&packed.scales));
            let m = packed.over(&codes[shift..], &scales[shift..]);
            let a = rng.wild(rows + 1);
            every_set(&format!("columns of {codec:?} ({rows}, {cols})"), |k| {
                let mut out = vec![7.0; cols + 3];
                k.columns(&m, &a[1..], &mut out[3..]);
                out
            });
        }
    }
}

#[test]
fn kda_step_follows_the_recurrence() {
    let mut rng = Rng(8);
    for d in [1, 8, 24, 32, 128] {
        let start = rng.vec(d * d);
        let (q, k, v) = (rng.vec(d), rng.vec(d), rng.vec(d));
        let decay: Vec<f32> = rng.vec(d).iter().map(|x| x.abs()).collect();
        let beta = 0.7f32;
        let got = every_set("kda", |kernels| {
            let (mut state, mut v, mut out) = (start.clone(), v.clone(), vec![0.0; d]);
            kernels.kda_step(&mut state, &decay, &q, &k, &mut v, beta, &mut out);
            [state, out].concat()
        });
        let f = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (mut s, q, k, v, a) = (f(&start), f(&q), f(&k), f(&v), f(&decay));
        for i in 0..d {
            for j in 0..d {
                s[i * d + j] *= a[i];
            }
        }
        let u: Vec<f64> = (0..d).map(|j| (0..d).map(|i| k[i] * s[i * d + j]).sum()).collect();
        for i in 0..d {
            for j in 0..d {
                s[i * d + j] += k[i] * f64::from(beta) * (v[j] - u[j]);
            }
        }
        for j in 0..d {
            let o: f64 = (0..d).map(|i| q[i] * s[i * d + j]).sum();
            close("output", got[d * d + j], o, d as f64, 1e-6);
        }
        for (got, exact) in got.iter().zip(&s) {
            close("state", *got, *exact, d as f64, 1e-6);
        }
    }
}

#[test]
fn kda_step_agrees_on_every_width_and_alignment() {
    let mut rng = Rng(42);
    for width in 1..=300 {
        let keys = 1 + rng.next() as usize % 40;
        let shift = width % 3;
        let state = rng.wild(shift + keys * width);
        let [decay, q, k] = std::array::from_fn(|_| rng.wild(shift + keys));
        let v = rng.wild(shift + width);
        every_set(&format!("kda_step ({keys}, {width})"), |kernels| {
            let (mut state, mut v) = (state.clone(), v.clone());
            let mut out = vec![7.0; shift + width];
            let [decay, q, k] = [&decay[shift..], &q[shift..], &k[shift..]];
            let out_here = &mut out[shift..];
            kernels.kda_step(&mut state[shift..], decay, q, k, &mut v[shift..], 0.7, out_here);
            [state, v, out].concat()
        });
    }
}

#[test]
fn attention_is_the_softmax_mean_over_any_number_of_blocks() {
    let mut rng = Rng(9);
    let (width, rank) = (40, 32);
    for positions in [1, 2, 63, 64, 65, 128, 200] {
        let q: Vec<f32> = rng.vec(width).iter().map(|x| 4.0 * x).collect();
        let cache = rng.vec(positions * width);
        let got = every_set("attend", |k| {
            let mut out = vec![0.0; rank];
            k.attend(&q, width, Latents::F32(&cache), 0.3, &mut out);
            out
        });
        let score = |row: &[f32]| {
            row.iter().zip(&q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() * 0.3
        };
        let scores: Vec<f64> = cache.chunks(width).map(score).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        for (c, got) in got.iter().enumerate() {
            let terms = scores.iter().zip(cache.chunks(width));
            let exact = terms.map(|(s, row)| (s - max).exp() / total * f64::from(row[c])).sum();
            close("attend", *got, exact, 1.0, 2e-6);
        }
    }
}

#[test]
fn attention_agrees_on_every_shape() {
    let mut rng = Rng(43);
    let mut among = |values: &[usize]| values[rng.next() as usize % values.len()];
    let shapes: Vec<[usize; 4]> = (0..200)
        .map(|_| {
            let width = among(&[1, 15, 16, 40, 64, 144, 208, 576]);
            let rank = among(&[1, width / 2, width / 16 * 16, width]).clamp(1, width);
            let heads = among(&[1, 2, 3, 4, 5, 7, 8, 9, 12, 31, 32, 33, 41]);
            [heads, width, rank, among(&[1, 2, 3, 4, 5, 7, 63, 64, 65, 66, 67, 130])]
        })
        .collect();
    let mut rng = Rng(44);
    for (case, [heads, width, rank, positions]) in shapes.into_iter().enumerate() {
        let shift = case % 3;
        let numbers = |rng: &mut Rng, n| match case % 4 {
            0 => rng.wild(n),
            _ => rng.vec(n),
        };
        let q = numbers(&mut rng, shift + heads * width);
        let cache = numbers(&mut rng, shift + positions * width);
        let attend = |k: &Kernels, q: &[f32], heads: usize| {
            let cache = Latents::F32(&cache[shift..]);
            let mut out = vec![7.0; shift + heads * rank];
            k.attend(q, width, cache, 0.3, &mut out[shift..]);
            out.split_off(shift)
        };
        let what = format!("{heads} heads of {width} and {rank}, {positions} positions");
        let together = every_set(&what, |k| attend(k, &q[shift..], heads));
        let alone = q[shift..].chunks(width).flat_map(|q| attend(&Kernels::SCALAR, q, 1));
        same_bits(&what, &together, &alone.collect::<Vec<f32>>());
    }
}

#[test]
fn attention_over_halves_is_attention_over_their_values() {
    let mut rng = Rng(48);
    for (case, width) in [1, 15, 16, 40, 64, 144, 576].into_iter().cycle().take(84).enumerate() {
        let (heads, positions) = (1 + case % 35, 1 + 13 * case % 131);
        let q = rng.vec(heads * width);
        let values =
            if case % 4 == 0 { rng.wild(positions * width) } else { rng.vec(positions * width) };
        for format in [LatentFormat::F16, LatentFormat::Bf16] {
            let mut cache = LatentCache::new(format);
            cache.extend_from_slice(&values);
            let rounded: Vec<f32> = values
                .iter()
                .map(|&x| match format {
                    LatentFormat::Bf16 => half::bf16::from_f32(x).to_f32(),
                    _ => half::f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32(),
                })
                .collect();
            let attend = |k: &Kernels, cache| {
                let mut out = vec![7.0; heads * width];
                k.attend(&q, width, cache, 0.3, &mut out);
                out
            };
            let what = format!("{format}, {heads} heads of {width}, {positions} positions");
            let got = every_set(&what, |k| attend(k, cache.view()));
            same_bits(&what, &got, &attend(&Kernels::SCALAR, Latents::F32(&rounded)));
        }
    }
}

#[test]
fn attention_of_infinite_and_missing_scores_agrees() {
    // Scores of −∞ and NaN in the first block, in a later one, everywhere.
    let (width, rank, heads) = (32, 16, 9);
    let q = vec![1.0; heads * width];
    for score in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, f32::MAX, -0.0] {
        for bad in [0..1, 0..64, 64..65, 64..128, 3..130, 0..130] {
            let mut cache = Rng(45).vec(130 * width);
            for t in bad.clone() {
                cache[t * width + t % width] = score;
            }
            every_set(&format!("{score} at {bad:?}"), |k| {
                let mut out = vec![0.0; heads * rank];
                k.attend(&q, width, Latents::F32(&cache), 0.5, &mut out);
                out
            });
        }
    }
}

#[test]
fn short_convolution_agrees_on_every_width_and_kernel() {
    let mut rng = Rng(46);
    for channels in 1..=300 {
        let (past, shift) = (channels % 5, channels % 3);
        let x = rng.wild(shift + channels);
        let history = rng.wild(shift + past * channels);
        let taps = rng.wild(shift + (past + 1) * channels);
        every_set(&format!("{past} past inputs of {channels} channels"), |k| {
            let (mut x, mut history) = (x.clone(), history.clone());
            k.short_conv(&mut x[shift..], &mut history[shift..], &taps[shift..]);
            [x, history].concat()
        });
    }
}

#[test]
fn short_convolution_remembers_its_three_previous_inputs() {
    let mut rng = Rng(10);
    let channels = 5;
    let taps = rng.vec(4 * channels);
    let inputs: Vec<Vec<f32>> = (0..9).map(|_| rng.vec(channels)).collect();
    let got = every_set("conv", |k| {
        let mut history = vec![0.0; 3 * channels];
        let step = |x: &Vec<f32>| {
            let mut x = x.clone();
            k.short_conv(&mut x, &mut history, &taps);
            x
        };
        inputs.iter().flat_map(step).collect()
    });
    for t in 0..inputs.len() {
        for c in 0..channels {
            let seen = (0..4).filter(|tap| t + tap >= 3);
            let term = |tap: usize| {
                f64::from(taps[tap * channels + c]) * f64::from(inputs[t + tap - 3][c])
            };
            let y: f64 = seen.map(term).sum();
            close("conv", got[t * channels + c], y / (1.0 + (-y).exp()), 1.0, 1e-6);
        }
    }
}

#[test]
fn elementwise_kernels_agree_on_every_length_and_on_wild_inputs() {
    type Step = fn(&Kernels, &mut [f32], &[f32]);
    let steps: [(&str, Step); 13] = [
        ("sigmoid_gate", |k, x, y| k.sigmoid_gate(x, y)),
        ("silu_product", |k, x, y| k.silu_product(x, y)),
        ("situ_product", |k, x, y| k.situ_product(x, y, 4.0, 25.0)),
        ("exp", |k, x, _| k.exp(x)),
        ("sigmoid", |k, x, _| k.sigmoid(x)),
        ("softmax", |k, x, _| k.softmax(x)),
        ("axpy", |k, x, y| k.axpy(0.37, y, x)),
        ("add", |k, x, y| k.add(y, x)),
        ("l2_normalise", |k, x, _| k.l2_normalise(x, 0.25)),
        ("decay_bounded", |k, x, y| k.decay_bounded(y, y, 1.5, -5.0, x)),
        ("decay_unbounded", |k, x, y| k.decay_unbounded(y, y, 0.5, x)),
        ("inverse_rms", |k, x, _| {
            if let [x, rest @ ..] = x {
                *x = k.inverse_rms(rest, 1e-5);
            }
        }),
        ("rms_norm", |k, x, y| {
            if !y.is_empty() {
                let input = x.to_vec();
                k.rms_norm(&input, y, 1e-5, x);
            }
        }),
    ];
    let mut rng = Rng(11);
    for n in 0..=300 {
        let shift = n % 4;
        let numbers = |rng: &mut Rng| if n % 2 == 0 { rng.wild(n + 4) } else { rng.vec(n + 4) };
        let (x, y) = (numbers(&mut rng), numbers(&mut rng));
        for (name, step) in steps {
            every_set(&format!("{name} of {n}"), |k| {
                let mut x = x.clone();
                step(k, &mut x[shift..shift + n], &y[4 - shift..][..n]);
                x
            });
        }
    }
}

#[test]
fn elementary_functions_stay_within_two_ulp_on_a_sample() {
    // The whole range is swept by examples/ulp_sweep.rs; this is every 4,099th value.
    type Function = (&'static str, fn(f32) -> f32, fn(f64) -> f64);
    let functions: [Function; 4] = [
        ("exp", math::exp, f64::exp),
        ("sigmoid", math::sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        ("tanh", math::tanh, f64::tanh),
        ("softplus", math::softplus, |x| x.max(0.0) + (-x.abs()).exp().ln_1p()),
    ];
    for (name, ours, exact) in functions {
        for bits in (0..=u32::MAX).step_by(4099) {
            let x = f32::from_bits(bits);
            let error = ulp_error(ours(x), exact(f64::from(x)));
            assert!(error <= 2.0, "{name}({x:e}) is {error} ulp off");
        }
        assert!(ours(f32::NAN).is_nan(), "{name} of NaN");
    }
}

proptest! {
    #[test]
    fn a_dot_product_of_anything_agrees(
        pairs in prop::collection::vec((any::<u32>(), any::<u32>()), 0..130),
    ) {
        let w: Vec<f32> = pairs.iter().map(|p| f32::from_bits(p.0)).collect();
        let x: Vec<f32> = pairs.iter().map(|p| f32::from_bits(p.1)).collect();
        every_set("dot", |k| vec![k.dot(&w, &x)]);
    }

    #[test]
    fn random_codes_and_scales_agree(
        packed in prop::collection::vec(any::<u8>(), 64),
        scales in prop::collection::vec(0u8..255, 4),
        x in prop::collection::vec(any::<f32>(), 64),
    ) {
        let m = Matrix::new(Codec::Mxfp4, 2, 64, &packed, &scales).unwrap();
        every_set("mxfp4", |k| {
            let mut out = vec![0.0; 2];
            k.matmul(&m, &x, 1, &mut out);
            out
        });
    }
}
