//! Every kernel of every set: sizes, alignments and bytes of any kind give the specification's bits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rill_kernels::{Codec, Kernels, LatentCache, LatentFormat, Matrix, Vq};

fuzz_target!(|data: &[u8]| {
    let mut input = Input { data, state: 1 };
    match input.below(4) {
        0 => elementwise(&mut input),
        1 => attention(&mut input),
        _ => products(&mut input),
    }
});

/// The fuzzer's bytes, and after them others that depend on the last of those.
struct Input<'a> {
    data: &'a [u8],
    state: u64,
}

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        if let Some((&byte, rest)) = self.data.split_first() {
            self.data = rest;
            self.state = (self.state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3) | 1;
            return byte;
        }
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state >> 32) as u8
    }

    fn below(&mut self, n: usize) -> usize {
        usize::from(u16::from_le_bytes([self.byte(), self.byte()])) % n
    }

    /// Any number: infinities, NaN and subnormals among ordinary ones.
    fn number(&mut self) -> f32 {
        let bits = u32::from_le_bytes([(); 4].map(|()| self.byte()));
        match bits % 8 {
            0 => f32::from_bits(bits),
            1 => f32::from_bits(bits & 0x807f_ffff),
            _ => (bits >> 8) as f32 / (1u32 << 22) as f32 - 2.0,
        }
    }

    fn numbers(&mut self, n: usize) -> Shifted<f32> {
        let shift = self.below(16);
        let before = vec![0.0; shift];
        Shifted { values: before.into_iter().chain((0..n).map(|_| self.number())).collect(), shift }
    }

    fn bytes(&mut self, n: usize) -> Shifted<u8> {
        let shift = self.below(64);
        let before = vec![0; shift];
        Shifted { values: before.into_iter().chain((0..n).map(|_| self.byte())).collect(), shift }
    }
}

/// Values that begin at any alignment, and end where the allocation does.
#[derive(Clone)]
struct Shifted<T> {
    values: Box<[T]>,
    shift: usize,
}

impl<T> std::ops::Deref for Shifted<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values[self.shift..]
    }
}

impl<T> std::ops::DerefMut for Shifted<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.values[self.shift..]
    }
}

/// Runs `f` with every set and demands the specification's bits.
fn same(what: &str, f: impl Fn(&Kernels) -> Vec<f32>) {
    let expected = f(&Kernels::SCALAR);
    for set in Kernels::all() {
        let found = f(&set);
        assert_eq!(found.len(), expected.len());
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            let same = a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same, "{what} ({}): element {i} is {a:e}, should be {b:e}", set.name());
        }
    }
}

/// The same for a kernel that changes some numbers in place.
fn same_in_place(what: &str, x: &Shifted<f32>, f: impl Fn(&Kernels, &mut [f32])) {
    same(what, |k| {
        let mut x = x.clone();
        f(k, &mut x);
        x.to_vec()
    });
}

fn products(input: &mut Input<'_>) {
    let group = 16 * (1 + input.below(8));
    let index_block = [0, 1, 4, 64][input.below(4)];
    let vq = |stages, entries, packed| Codec::Vq(Vq { stages, entries, index_block, packed });
    let (codec, step) = match input.below(8) {
        0 => (Codec::F32, 1),
        1 => (Codec::Bf16, 1),
        2 => (Codec::Q8 { group }, 1),
        3 => (Codec::Q4 { group }, 1),
        4 => (Codec::Mxfp4, 32),
        5 => (vq(4, 64, true), 8),
        n => (vq(n - 4, 256, false), 8),
    };
    let rows = 1 + input.below(40);
    let cols = step * (1 + input.below(300 / step));
    let layout = codec.layout(rows, cols).expect("a shape of the format");
    let tables = match codec {
        Codec::Vq(vq) => input.numbers(vq.stages * vq.entries * 8),
        _ => input.numbers(0),
    };
    let codes = input.bytes(layout.codes);
    let mut scales = input.bytes(layout.scales);
    for (i, byte) in scales.iter_mut().enumerate() {
        match codec {
            // Not NaN; not infinite.
            Codec::Mxfp4 => *byte = (*byte).min(254),
            _ if i % 2 == 1 => *byte &= 0xbb,
            _ => {}
        }
    }
    let matrix = Matrix::with_tables(codec, rows, cols, &codes, &scales, &tables).expect("sound");
    let first = input.below(rows);
    let matrix = matrix.row_range(first..rows);
    let rows = matrix.rows();
    let n = 1 + input.below(20);
    let (x, a) = (input.numbers(n * cols), input.numbers(rows));
    same("matmul", |k| {
        let mut out = vec![f32::NAN; rows * n];
        k.matmul(&matrix, &x, n, &mut out);
        out
    });
    same("columns", |k| {
        let mut out = vec![f32::NAN; cols];
        k.columns(&matrix, &a, &mut out);
        out
    });
}

fn elementwise(input: &mut Input<'_>) {
    let n = 1 + input.below(200);
    let [x, y, z] = [(); 3].map(|()| input.numbers(n));
    let (a, b) = (input.number(), input.number());
    same("dot, sum, inverse_rms", |k| vec![k.dot(&x, &y), k.sum(&x), k.inverse_rms(&x, a.abs())]);
    same("rms_norm", |k| {
        let mut out = vec![f32::NAN; n];
        k.rms_norm(&x, &y, a.abs(), &mut out);
        out
    });
    same("decay", |k| {
        let mut out = vec![f32::NAN; 2 * n];
        k.decay_bounded(&x, &y, a, b, &mut out[..n]);
        k.decay_unbounded(&x, &y, a, &mut out[n..]);
        out
    });
    same_in_place("l2_normalise", &x, |k, x| k.l2_normalise(x, a));
    same_in_place("sigmoid_gate", &x, |k, x| k.sigmoid_gate(x, &y));
    same_in_place("silu_product", &x, |k, x| k.silu_product(x, &y));
    same_in_place("situ_product", &x, |k, x| k.situ_product(x, &y, a, b));
    same_in_place("sigmoid", &x, |k, x| k.sigmoid(x));
    same_in_place("softmax", &x, |k, x| k.softmax(x));
    same_in_place("axpy", &x, |k, x| k.axpy(a, &y, x));
    same_in_place("add", &x, |k, x| k.add(&y, x));
    let steps = input.below(5);
    let (history, taps) = (input.numbers(steps * n), input.numbers((steps + 1) * n));
    same("short_conv", |k| {
        let (mut z, mut history) = (z.clone(), history.clone());
        k.short_conv(&mut z, &mut history, &taps);
        [z.to_vec(), history.to_vec()].concat()
    });
}

fn attention(input: &mut Input<'_>) {
    let (keys, values) = (1 + input.below(70), 1 + input.below(70));
    let [decay, q, k_h] = [(); 3].map(|()| input.numbers(keys));
    let (v, state) = (input.numbers(values), input.numbers(keys * values));
    let beta = input.number();
    same("kda_step", |k| {
        let (mut v, mut state, mut out) = (v.clone(), state.clone(), vec![f32::NAN; values]);
        k.kda_step(&mut state, &decay, &q, &k_h, &mut v, beta, &mut out);
        [state.to_vec(), out].concat()
    });
    let (positions, width) = (1 + input.below(150), 1 + input.below(40));
    let heads = 1 + input.below(9);
    let (q, values) = (input.numbers(heads * width), input.numbers(positions * width));
    let mut cache = LatentCache::new(LatentFormat::ALL[input.below(3)]);
    cache.extend_from_slice(&values);
    let rank = 1 + input.below(width);
    same("attend", |k| {
        let mut out = vec![f32::NAN; heads * rank];
        k.attend(&q, width, cache.view(), beta, &mut out);
        out
    });
}
