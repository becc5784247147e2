//! The engine on trellis experts: right by their own decoded weights, the same on everything, and good
//! enough to be the standard.

mod common;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::LazyLock;

use common::{assert_same_bits, convert, reference, repository};
use rill::{
    Engine, EngineOptions, Folder, ForcedRouting, KernelChoice, Logits, Observer, RoutingRecorder,
};
use rill_convert::{Control, ExpertCodec, Plan, TrunkCodec};
use rill_format::container::Container;
use rill_kernels::Kernels;

const NANO: &str = "models/k3-nano";
const STANDARD: ExpertCodec = ExpertCodec::Trellis { rate: 23 };

/// k3-nano with standard experts, made once.
static CONTAINER: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| convert(NANO, STANDARD, TrunkCodec::Source));

fn open(folder: &Path, options: &EngineOptions) -> Engine {
    Engine::open(Folder::Disk(folder.to_owned()), options).expect("the model opens")
}

fn ids() -> Vec<u32> {
    reference(&Folder::Disk(repository(NANO))).input_ids[..64].to_vec()
}

fn logits(engine: &Engine) -> Vec<f32> {
    engine.forward(&mut engine.new_session(), &ids(), Logits::All).expect("it runs")
}

fn observed(engine: &Engine, observer: &mut (dyn Observer + Send)) -> Vec<f32> {
    let mut session = engine.new_session();
    let logits = engine.forward_observed(&mut session, &ids(), Logits::All, observer);
    logits.expect("it runs")
}

#[test]
fn logits_are_those_of_the_decoded_weights_with_the_same_routing() {
    // The same weights as plain numbers. The engine's own f32 arithmetic is within 1e-6 of binary64
    // (`fixtures.rs`), a hundredth of what is allowed here.
    let container = Container::open(CONTAINER.path().to_owned()).unwrap();
    let plain = tempfile::tempdir().unwrap();
    let plan = Plan::new(&container, ExpertCodec::F32, TrunkCodec::Source).unwrap();
    let control = Control { jobs: 2, progress: &|_| ControlFlow::Continue(()) };
    rill_convert::convert(&container, &plan, plain.path(), &control).unwrap();

    let options = EngineOptions::default();
    let (trellis, plain) = (open(CONTAINER.path(), &options), open(plain.path(), &options));
    let mut recorder = RoutingRecorder::new(trellis.config());
    let found = observed(&trellis, &mut recorder);
    let trace = recorder.trace().unwrap();
    let mut forced = ForcedRouting::new(trace.clone().into(), plain.config()).unwrap();
    let expected = observed(&plain, &mut forced);
    let vocab = trellis.config().vocab_size;
    let positions = found.chunks_exact(vocab).zip(expected.chunks_exact(vocab));
    let mut errors: Vec<f64> = positions
        .map(|(found, expected)| {
            let square = |x: f64| x * x;
            let lost = found.iter().zip(expected).map(|(a, b)| square(f64::from(a - b)));
            let all = expected.iter().map(|&b| square(f64::from(b)));
            (lost.sum::<f64>() / all.sum::<f64>()).sqrt()
        })
        .collect();
    errors.sort_by(f64::total_cmp);
    let (median, worst) = (errors[errors.len() / 2], errors[errors.len() - 1]);
    println!("against decoded weights: median {median:.2e}, worst {worst:.2e}");
    assert!(median > 0.0, "plain numbers cannot have the bits of integers");
    assert!(median <= 5e-4 && worst <= 1e-2, "median {median:e}, worst {worst:e}");
}

#[test]
fn threads_chunks_and_kernels_do_not_change_bits() {
    let with = |options: &EngineOptions| logits(&open(CONTAINER.path(), options));
    let expected = with(&EngineOptions::default());
    for threads in [1, 3] {
        let found = with(&EngineOptions { threads, ..EngineOptions::default() });
        assert_same_bits(&format!("{threads} threads"), &found, &expected);
    }
    for prefill_chunk in [1, 5] {
        let found = with(&EngineOptions { prefill_chunk, ..EngineOptions::default() });
        assert_same_bits(&format!("chunks of {prefill_chunk}"), &found, &expected);
    }
    for set in Kernels::all() {
        let kernels = KernelChoice::Named(set.name().to_owned());
        let found = with(&EngineOptions { kernels, ..EngineOptions::default() });
        assert_same_bits(set.name(), &found, &expected);
    }
}

#[test]
fn the_floor_gives_the_bits_of_everything_held() {
    let options = EngineOptions { context: 64, logits: 64, ..EngineOptions::default() };
    let folder = Folder::Disk(CONTAINER.path().to_owned());
    let budget_bytes = common::floor_bytes(&folder, &options);
    let least = open(CONTAINER.path(), &EngineOptions { budget_bytes, ..options.clone() });
    assert_same_bits("floor", &logits(&least), &logits(&open(CONTAINER.path(), &options)));
}

#[test]
fn standard_quality_costs_less_than_a_percent_of_perplexity() {
    let text = Folder::Disk(repository(NANO)).read("heldout.txt", 1 << 20).expect("it is there");
    let perplexity = |path: &Path| {
        let engine = open(path, &EngineOptions::default());
        let ids = engine.open_tokenizer().expect("it is inside").encode_text_bytes(&text);
        let found = engine.perplexity(&ids[..2550], 255, &mut |_, _| ControlFlow::Continue(()));
        found.expect("it runs").perplexity
    };
    let (lossless, standard) = (perplexity(&repository(NANO)), perplexity(CONTAINER.path()));
    println!("perplexity of ten windows: {lossless:.3}, standard {standard:.3}");
    assert_ne!(lossless, standard);
    assert!((standard / lossless - 1.0).abs() < 0.01, "{standard} against {lossless}");
}
