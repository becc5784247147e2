//! Latents kept as halves: half the memory, a little rounding, and everything else as with f32.

mod common;

use common::{assert_same_bits, demo, fingerprint, k3_tiny, kimi_linear_tiny, reference};
use rill::{Engine, EngineOptions, Error, Folder, KernelChoice, LatentFormat, Logits};
use rill_kernels::Kernels;

const HALVES: [LatentFormat; 2] = [LatentFormat::F16, LatentFormat::Bf16];

fn open(folder: &Folder, latents: LatentFormat) -> Engine {
    let options = EngineOptions { latents, sessions: 2, ..Default::default() };
    Engine::open(folder.clone(), &options).expect("the model opens")
}

fn logits(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    engine.forward(&mut engine.new_session(), ids, Logits::All).expect("it runs")
}

/// What a deliberate change of arithmetic changes, the same on x86-64 and 64-bit Arm.
#[test]
fn logits_over_halves_have_the_committed_fingerprints() {
    let found = [demo(), k3_tiny(), kimi_linear_tiny()].map(|folder| {
        let ids = reference(&folder).input_ids;
        HALVES
            .map(|latents| format!("{:#018x}", fingerprint(&logits(&open(&folder, latents), &ids))))
    });
    assert_eq!(found, FINGERPRINTS.map(|of| of.map(|hash| format!("{hash:#018x}"))));
}

const FINGERPRINTS: [[u64; 2]; 3] = [
    [0xb092_7765_eab9_5874, 0x7592_fb99_b51f_8740],
    [0xdd11_fab4_81a5_abb9, 0xc9bc_bc5f_d212_ab81],
    [0x2b4d_c05c_0116_605b, 0x94cc_3a3a_6607_f965],
];

#[test]
fn kernels_chunks_and_forks_do_not_change_bits_over_halves() {
    let folder = k3_tiny();
    let ids = reference(&folder).input_ids;
    for latents in HALVES {
        let whole = logits(&open(&folder, latents), &ids);
        for set in Kernels::all() {
            let options = EngineOptions {
                latents,
                kernels: KernelChoice::Named(set.name().to_owned()),
                prefill_chunk: 3,
                ..Default::default()
            };
            let engine = Engine::open(folder.clone(), &options).expect("the model opens");
            assert_same_bits(set.name(), &logits(&engine, &ids), &whole);
        }
        let engine = open(&folder, latents);
        let mut session = engine.new_session();
        let (first, rest) = ids.split_at(5);
        let mut pieces = engine.forward(&mut session, first, Logits::All).unwrap();
        let mut fork = session.fork().unwrap();
        engine.forward(&mut session, &[1, 2, 3], Logits::None).unwrap();
        pieces.extend(engine.forward(&mut fork, rest, Logits::All).unwrap());
        assert_same_bits("a fork", &pieces, &whole);
    }
}

/// They are rounded, and only rounded: a cache that is not read would be far away, one that is not
/// rounded would be the same.
#[test]
fn halves_change_logits_a_little() {
    for folder in [demo(), k3_tiny(), kimi_linear_tiny()] {
        let ids = reference(&folder).input_ids;
        let exact = logits(&open(&folder, LatentFormat::F32), &ids);
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
        // Eleven and eight significant bits.
        for (latents, bits) in HALVES.into_iter().zip([11, 8]) {
            let rounded = logits(&open(&folder, latents), &ids);
            let difference = norm(&mut rounded.iter().zip(&exact).map(|(a, b)| a - b));
            let relative = difference / norm(&mut exact.iter().copied());
            println!("{latents}: {relative:.2e}");
            assert!(relative > 0.0 && relative < 4.0 / (1 << bits) as f32, "{latents}: {relative}");
        }
    }
}

#[test]
fn halves_take_half_the_memory_of_latents() {
    let folder = kimi_linear_tiny();
    let cached = |latents| {
        let engine = open(&folder, latents);
        let planned = engine.plan().shares.cache;
        let mut session = engine.new_session();
        let before = session.snapshot_bytes();
        engine.forward(&mut session, &[1, 2, 3, 4, 5, 6], Logits::None).unwrap();
        (planned, session.snapshot_bytes() - before)
    };
    let (planned, used) = cached(LatentFormat::F32);
    assert!(planned > 0 && used > 0);
    for latents in HALVES {
        assert_eq!(cached(latents), (planned / 2, used / 2), "{latents}");
    }
}

#[test]
fn a_saved_session_is_one_of_its_format() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("talk");
    let folder = k3_tiny();
    let ids = reference(&folder).input_ids;
    let (first, rest) = ids.split_at(7);
    for latents in LatentFormat::ALL {
        let engine = open(&folder, latents);
        let mut session = engine.new_session();
        engine.forward(&mut session, first, Logits::None).unwrap();
        engine.save_session(&session, &path, "").unwrap();
        let whole = engine.forward(&mut session, rest, Logits::All).unwrap();
        for other in LatentFormat::ALL {
            match open(&folder, other).load_session(&path) {
                Ok((session, _)) if other == latents => assert_eq!(session.tokens(), first),
                Err(Error::SessionFile { what: "its latents", expected, found, .. })
                    if other != latents =>
                {
                    assert_eq!((expected.as_str(), found.as_str()), (other.name(), latents.name()));
                }
                result => panic!("{latents} read as {other}: {result:?}"),
            }
        }
        let (mut loaded, _) = engine.load_session(&path).unwrap();
        let again = engine.forward(&mut loaded, rest, Logits::All).unwrap();
        assert_same_bits(latents.name(), &again, &whole);
    }
}
