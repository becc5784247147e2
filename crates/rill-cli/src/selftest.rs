//! `rill selftest`: this installation against the built-in reference values.

use anyhow::{Context, Result, bail};
use rill::chat::ChatFormat;
use rill::reference::{Errors, Feed, Reference, compare};
use rill::{Engine, EngineOptions, Folder, GenerateOptions};

use crate::args::SelftestArgs;
use crate::model::Needs;
use crate::output::{Outcome, print};
use crate::{bundle, model};

/// Largest expected-values file that makes sense.
const MAX_REFERENCE_BYTES: u64 = 1 << 30;

/// A built-in model and the largest relative errors (median, worst) it may show.
struct Case {
    name: &'static str,
    folder: Folder,
    feed: Feed,
    tolerance: (f64, f64),
}

pub(crate) fn run(args: &SelftestArgs) -> Result<Outcome> {
    if args.engine.learn.is_some() {
        crate::prompt::usage("--learn is for one model, and selftest opens several");
    }
    let options = |needs| model::options(&args.engine, needs);
    verify(&cases(), bundle::demo(), &options, &|line| print(line + "\n"))
}

fn cases() -> [Case; 4] {
    let case = |name, folder, feed, tolerance| Case { name, folder, feed, tolerance };
    // The reference of kimi-linear-tiny is float32 in one place, and k3-tiny has a few
    // ill-conditioned positions: hence the wider bounds on their worst positions.
    [
        case("k3-nano", bundle::demo(), Feed::Free, (1e-6, 5e-6)),
        case("k3-tiny", bundle::k3_tiny(), Feed::Free, (3e-6, 1e-4)),
        case("k3-tiny, layer by layer", bundle::k3_tiny(), Feed::ExpectedInputs, (3e-6, 3e-6)),
        case("kimi-linear-tiny", bundle::kimi_linear_tiny(), Feed::Free, (3e-6, 2e-5)),
    ]
}

/// How engines are set up for what is asked of them.
type Options<'a> = &'a dyn Fn(Needs) -> EngineOptions;

/// Where a line of the report goes.
type Show<'a> = &'a dyn Fn(String) -> Result<()>;

/// Checks every case and the answer of the demo model.
fn verify(cases: &[Case], demo: Folder, options: Options<'_>, show: Show<'_>) -> Result<Outcome> {
    let mut failed = 0;
    for case in cases {
        failed += usize::from(!check(case, options, show).with_context(|| case.name)?);
    }
    let answer = ask(demo, options)?;
    let right = answer == "The capital of Italy is Rome.";
    failed += usize::from(!right);
    show(format!("{} What is the capital of Italy? {answer}", verdict(right)))?;
    if failed > 0 {
        bail!("{failed} of {} checks failed: do not trust this build's results", cases.len() + 1);
    }
    show(format!("all {} checks passed", cases.len() + 1))?;
    Ok(Outcome::Done)
}

fn check(case: &Case, options: Options<'_>, show: Show<'_>) -> Result<bool> {
    let reference = case.folder.read("expected.safetensors", MAX_REFERENCE_BYTES)?;
    let reference = Reference::parse(&reference)?;
    let n = reference.input_ids.len();
    let engine =
        Engine::open(case.folder.clone(), &options(Needs { context: n, logits: n, sessions: 1 }))?;
    let found = compare(&engine, &reference, case.feed)?;
    let (median, worst) = case.tolerance;
    // Written so that NaN fails.
    let within = |e: Errors| e.median <= median && e.worst <= worst;
    let ok = within(found.logits)
        && within(found.hidden)
        && found.kda_state.is_none_or(within)
        && found.routing_differences.0 == 0
        && found.arg_max_differences == 0;
    let routings = match found.routing_differences {
        (_, 0) => String::new(),
        (different, all) => format!("; {different} of {all} routings differ"),
    };
    show(format!(
        "{} {}: logits {:.1e} median, {:.1e} worst; hidden states {:.1e}, {:.1e}{routings}",
        verdict(ok),
        case.name,
        found.logits.median,
        found.logits.worst,
        found.hidden.median,
        found.hidden.worst,
    ))?;
    Ok(ok)
}

/// Tokenizer, chat format and generation together.
fn ask(folder: Folder, options: Options<'_>) -> Result<String> {
    let engine = Engine::open(folder, &options(Needs { context: 256, logits: 1, sessions: 1 }))?;
    let tokenizer = engine.open_tokenizer()?;
    let format = ChatFormat::detect(&tokenizer).context("the model has no chat format")?;
    let prompt = format.render_question(&tokenizer, "What is the capital of Italy?", false)?;
    let mut reader = format.reply_reader(&tokenizer, false);
    let mut session = engine.new_session();
    let options = GenerateOptions { max_tokens: 40, ..Default::default() };
    let mut content = Vec::new();
    for token in engine.generate(&mut session, &prompt, options)? {
        let token = token?.id;
        if matches!(reader.push(token), rill::chat::ReplyPart::Content) {
            content.extend_from_slice(tokenizer.token_bytes(token).unwrap_or_default());
        }
    }
    Ok(String::from_utf8_lossy(&content).into_owned())
}

fn verdict(ok: bool) -> &'static str {
    if ok { "ok  " } else { "FAIL" }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::fs;
    use std::path::Path;

    use safetensors::SafeTensors;
    use tempfile::TempDir;

    use super::*;

    /// A copy of k3-tiny.
    fn k3_tiny() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/k3-tiny");
        for entry in fs::read_dir(original).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
        }
        folder
    }

    /// The checks of k3-tiny, with all but the folder as in the program.
    fn cases_of(folder: &TempDir) -> Vec<Case> {
        let mut cases: Vec<Case> =
            cases().into_iter().filter(|case| case.name.starts_with("k3-tiny")).collect();
        for case in &mut cases {
            case.folder = Folder::Disk(folder.path().to_owned());
        }
        assert_eq!(cases.len(), 2);
        cases
    }

    /// Flips the lowest exponent bit of the first bf16 of a tensor.
    fn damage(folder: &TempDir, tensor: &str) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if !path.file_name().unwrap().to_str().unwrap().starts_with("model-") {
                continue;
            }
            let mut bytes = fs::read(&path).unwrap();
            let shard = SafeTensors::deserialize(&bytes).unwrap();
            if let Ok(view) = shard.tensor(tensor) {
                let start = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
                bytes[start + 1] ^= 1;
                return fs::write(path, bytes).unwrap();
            }
        }
        panic!("no {tensor}");
    }

    fn passes(case: &Case) -> bool {
        check(case, &|_| EngineOptions::default(), &|_| Ok(())).unwrap()
    }

    /// The lines that are printed, and the message if it fails.
    fn report(cases: &[Case], demo: Folder) -> (Vec<String>, Option<String>) {
        let lines = RefCell::new(Vec::new());
        let show = |line| {
            lines.borrow_mut().push(line);
            Ok(())
        };
        let result = verify(cases, demo, &|_| EngineOptions::default(), &show);
        (lines.into_inner(), result.err().map(|e| e.to_string()))
    }

    #[test]
    fn an_undamaged_checkpoint_passes() {
        let folder = k3_tiny();
        for case in cases_of(&folder) {
            assert!(passes(&case), "{}", case.name);
        }
    }

    #[test]
    fn one_damaged_weight_fails_every_check_of_its_model() {
        for tensor in [
            "language_model.model.norm.weight",
            "language_model.lm_head.weight",
            "language_model.model.layers.4.self_attn.o_proj.weight",
        ] {
            let folder = k3_tiny();
            damage(&folder, tensor);
            for case in cases_of(&folder) {
                assert!(!passes(&case), "{}: {tensor}", case.name);
            }
        }
    }

    #[test]
    fn a_failed_check_and_a_wrong_answer_fail_the_selftest() {
        let folder = k3_tiny();
        damage(&folder, "language_model.model.norm.weight");
        let (lines, error) = report(&cases_of(&folder), bundle::demo());
        assert!(error.unwrap().starts_with("2 of 3 checks failed"));
        let verdicts: Vec<&str> = lines.iter().map(|line| &line[..5]).collect();
        assert_eq!(verdicts, ["FAIL ", "FAIL ", "ok   "]);

        // Random weights do not know Rome.
        let (lines, error) = report(&[], Folder::Disk(folder.path().to_owned()));
        assert!(error.unwrap().starts_with("1 of 1 checks failed"));
        assert!(lines[0].starts_with("FAIL ") && lines.len() == 1, "{lines:?}");
        assert_eq!(report(&[], bundle::demo()).1, None);
    }
}
