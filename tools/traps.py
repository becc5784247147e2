#!/usr/bin/env python3
"""Breaks the code on purpose, one fault at a time, and demands that a test notices.

    python3 tools/traps.py [NAME...]

Each fault is a replacement in one file and the tests that must fail because of it. The committed
tree is checked out under target/traps, so the working tree is never touched. A fault whose text is
no longer found, that does not compile, or that no test notices ends with exit code 1.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TREE = ROOT / "target/traps/tree"
BUILD = ROOT / "target/traps/build"

FIXTURES = "-p rill --test fixtures"
BITS = "-p rill --test bits"
TRAPS = "-p rill --test traps"
KERNELS = "-p rill-kernels --test bits"
PRODUCTS = "-p rill-kernels --test products"
POOL = "-p rill-kernels --lib"
STEPS = "crates/rill-kernels/src/steps.rs"
HOSTILE = "-p rill --test hostile"
BUDGETS = "-p rill --test budgets"
CONTAINERS = "-p rill --test containers"
CACHE = "-p rill-stream --test cache"
TILES = "-p rill-kernels --test tiles"
TRELLIS = "-p rill --test trellis"
BATCHES = "-p rill --test batches"
SCHEDULER = "-p rill --test scheduler"
AGENDA = "-p rill --lib agenda"
SAVED = "-p rill --test saved"
FILES = "-p rill-stream --lib files"
LATENTS = "-p rill --test latents"
PREFIXES = "-p rill --test prefixes"

# name, file, [(old, new) or (old, new, another file)], tests that must fail
FAULTS = [
    # Formats in tiles of rows.
    ("rows_of_a_tile_from_its_start", "crates/rill-kernels/src/table.rs", [
        ("let before = first - tiles.start;", "let before = 0 * (first - tiles.start);"),
    ], [TILES]),
    ("part_of_a_trellis_decoded_from_the_top", "crates/rill-kernels/src/matrix.rs", [
        ("return trellis.decode_row(first + row, out);", "return trellis.decode_row(first * 0 + row, out);"),
    ], [TILES]),
    ("part_of_entropy_coded_rows_decoded_from_the_top", "crates/rill-kernels/src/matrix.rs", [
        ("return mxfp4z.decode_row(first + row, out);", "return mxfp4z.decode_row(first * 0 + row, out);"),
    ], [TILES]),
    ("trellis_tables_of_another_matrix", "crates/rill-convert/src/trellis.rs", [
        ("encoder.tables().bytes().to_vec()", "{ let mut t = encoder.tables().bytes().to_vec(); t.rotate_left(1); t }"),
    ], ["-p rill-cli --test cli qualities"]),
    ("compared_layers_not_led", "crates/rill/src/comparison.rs", [
        ("        hidden.copy_from_slice(expected);\n", ""),
    ], ["-p rill --lib comparison"]),
    # The places that are silently wrong.
    ("a_log_per_channel", "crates/rill/src/kda.rs", [
        ("let rate = weights.decay_rate[h];", ""),
        ("kernels.decay_bounded(&z[at.clone()], bias, rate, lower_bound, &mut decay);",
         "for c in 0..dim { let i = at.start + c; kernels.decay_bounded(&z[i..=i], &bias[c..=c], "
         "weights.decay_rate[c % heads], lower_bound, &mut decay[c..=c]); }"),
        ("kernels.decay_unbounded(&z[at.clone()], bias, rate, &mut decay);", ""),
    ], [FIXTURES, TRAPS]),
    ("delta_against_the_undecayed_state", "crates/rill-kernels/src/scalar.rs", [
        ("            *s *= a;\n            *u = k.mul_add(*s, *u);",
         "            *u = k.mul_add(*s, *u);\n            *s *= a;"),
        ("u[j] = fma(splat(k), mul(splat(a), load(&row[j])), u[j]);",
         "u[j] = { let _ = a; fma(splat(k), load(&row[j]), u[j]) };", STEPS),
    ], [FIXTURES]),
    ("output_from_the_old_state", "crates/rill-kernels/src/scalar.rs", [
        ("            *s = k.mul_add(*d, *s);\n            *o = q.mul_add(*s, *o);",
         "            *o = q.mul_add(*s, *o);\n            *s = k.mul_add(*d, *s);"),
        ("store(s, &mut row[j]);\n                    o[j] = fma(q, s, o[j]);",
         "o[j] = fma(q, mul(a, load(&row[j])), o[j]);\n                    store(s, &mut row[j]);",
         STEPS),
    ], [FIXTURES]),
    ("rope_slots_dropped", "crates/rill/src/mla.rs", [
        ("shared.copy_from_slice(&q[nope..]);", "shared.fill(0.0);"),
    ], [FIXTURES, TRAPS]),
    ("softmax_scale_without_rope", "crates/rill/src/mla.rs", [
        ("((nope + rope) as f32).sqrt()", "(nope as f32).sqrt()"),
    ], [FIXTURES]),
    ("combined_with_biased_scores", "crates/rill/src/moe.rs", [
        ("scores[id as usize]).collect()", "biased[id as usize]).collect()"),
    ], [FIXTURES, TRAPS]),
    ("one_mix_for_both_sites", "crates/rill/src/step.rs", [
        ("residual::mix(kernels, eps, ffn_mix, blocks, prefix)",
         "{ let _ = ffn_mix; residual::mix(kernels, eps, attention_mix, blocks, prefix) }"),
    ], [FIXTURES, TRAPS]),
    ("layer_lists_read_as_zero_based", "crates/rill/src/config.rs", [
        ("Some((1..=n_layers).map(kind).collect())", "Some((0..n_layers).map(kind).collect())"),
    ], ["-p rill --test config", FIXTURES]),
    ("nibbles_swapped", "crates/rill-kernels/src/codec/mxfp4.rs", [
        ("let v = |i: usize| VALUES[usize::from(codes[i / 2] >> (4 * (i % 2)) & 15)];",
         "let v = |i: usize| VALUES[usize::from(codes[i / 2] >> (4 * (1 - i % 2)) & 15)];"),
    ], [KERNELS]),
    ("subnormal_scale_flushed", "crates/rill-kernels/src/codec/mxfp4.rs", [
        (".max(1 << 22))", ".max(0))"),
    ], [KERNELS]),
    ("short_conv_state_forgotten", "crates/rill/src/kda.rs", [
        ("            conv.clone_from(&state.now.conv[i]);",
         "            conv.clone_from(&state.now.conv[i]); conv.fill(0.0);"),
    ], [BITS, TRAPS]),
    ("bounded_gate_clamped_instead", "crates/rill-kernels/src/scalar.rs", [
        ("math::exp(lower_bound * math::sigmoid(rate * (z + bias)))",
         "math::exp((-rate * math::softplus(z + bias)).max(lower_bound))"),
    ], [FIXTURES]),
    ("sigmoid_of_the_capped_gate", "crates/rill-kernels/src/math.rs", [
        ("(beta * tanh(g / beta) * sigmoid(g))",
         "(beta * tanh(g / beta) * sigmoid(beta * tanh(g / beta)))"),
    ], [FIXTURES]),
    ("norm_before_the_aggregate", "crates/rill/src/moe.rs", [
        ("if let Some(norm) = &latent.norm {", "if let (Some(norm), true) = (&latent.norm, n == 0) {"),
    ], [FIXTURES]),
    # The invariants.
    ("reduction_with_eight_partial_sums", "crates/rill-kernels/src/codec/plain.rs", [
        ("p[i - whole] = w(i).mul_add(x[i], p[i - whole]);",
         "p[(i - whole) % 8] = w(i).mul_add(x[i], p[(i - whole) % 8]);"),
    ], [KERNELS]),
    ("experts_summed_by_falling_id", "crates/rill/src/moe.rs", [
        ("for (i, result) in results.chunks_exact(width).enumerate() {",
         "for (i, result) in results.chunks_exact(width).enumerate().rev() {"),
    ], [BITS]),
    ("experts_summed_as_they_arrive", "crates/rill/src/moe.rs", [
        ("results[place * width..][..width].copy_from_slice(out);",
         "let sum = &mut results[place / top_k * top_k * width..][..width]; "
         "for (s, o) in sum.iter_mut().zip(out) { *s += routing.weights[place] * o; }"),
        ("compute.kernels.axpy(routing.weights[i], result, token);",
         "compute.kernels.add(result, token);"),
    ], [HOSTILE]),
    ("a_token_sees_the_whole_chunk", "crates/rill/src/mla.rs", [
        ("cache.first((past + t + 1) * width)", "cache.first((past + n) * width)"),
    ], [BITS, FIXTURES]),
    ("attention_blocks_counted_from_the_end", "crates/rill-kernels/src/latents.rs", [
        ("(0..len).step_by(block).map(move |first| first..len.min(first + block))",
         "(0..len).step_by(block).map(move |first| len.saturating_sub(first + block)..len - first)"
         ".collect::<Vec<_>>().into_iter().rev()"),
    ], [BITS]),
    ("latents_read_with_the_wrong_exponent", "crates/rill-kernels/src/latents.rs", [
        ("u32::from(bits) << 16", "u32::from(bits) << 15"),
    ], [KERNELS]),
    ("latents_not_rounded", "crates/rill/src/session.rs", [
        ("LatentCache::new(home.latents)", "LatentCache::new(rill_kernels::LatentFormat::F32)"),
    ], [LATENTS]),
    ("threads_get_wrong_rows", "crates/rill-kernels/src/pool.rs", [
        ("f(first..first + part.len() / per_row, part);",
         "f(0..part.len() / per_row, { let _ = first; part });"),
    ], [POOL, KERNELS, BITS]),
    ("vectors_take_the_delta_against_the_undecayed_state", STEPS, [
        ("u[j] = fma(splat(k), mul(splat(a), load(&row[j])), u[j]);",
         "u[j] = { let _ = a; fma(splat(k), load(&row[j]), u[j]) };"),
    ], [KERNELS]),
    ("vectors_take_the_output_from_the_old_state", STEPS, [
        ("store(s, &mut row[j]);\n                    o[j] = fma(q, s, o[j]);",
         "o[j] = fma(q, mul(a, load(&row[j])), o[j]);\n                    store(s, &mut row[j]);"),
    ], [KERNELS]),
    ("vectors_attend_from_the_end", STEPS, [
        ("block.chunks_exact(width).enumerate().take(ATTENTION_BLOCK) {",
         "block.chunks_exact(width).enumerate().take(ATTENTION_BLOCK).rev() {"),
    ], [KERNELS]),
    ("nan_scale_accepted", "crates/rill-kernels/src/codec/mxfp4.rs", [
        ("first(scales, |&e| e == NAN_SCALE)", "first(scales, |_| false)"),
    ], [KERNELS, HOSTILE]),
    ("failed_step_leaves_its_traces", "crates/rill/src/session.rs", [
        ("                state.cache.truncate(positions * width);", "                let _ = (positions, width, state);"),
    ], [HOSTILE]),
    # Sessions that share an engine.
    ("a_token_attends_to_its_neighbours_query", "crates/rill/src/mla.rs", [
        ("&q[((first_row + t) * heads + h)", "&q[((0 * first_row + t) * heads + h)"),
    ], [BATCHES]),
    ("gates_of_the_first_session_for_all", "crates/rill/src/kda.rs", [
        ("let t = *row + t;", "let t = 0 * *row + t;"),
    ], [BATCHES]),
    ("a_stopped_session_leaves_its_rows", "crates/rill/src/step.rs", [
        ("                values.drain(range.clone());", "                let _ = (&values, range.clone());"),
    ], [BATCHES]),
    ("routing_told_to_the_wrong_session", "crates/rill/src/step.rs", [
        ("let places = rows.range.start * top_k..rows.range.end * top_k;",
         "let places = 0..rows.range.len() * top_k;"),
    ], [BATCHES]),
    ("a_fork_without_the_past", "crates/rill/src/session.rs", [
        ("own.now.clone_from(&other.now)", "{ let _ = (own, other); }"),
    ], [BITS]),
    ("prompts_hold_up_decoding", "crates/rill/src/scheduler/agenda.rs", [
        ("            left = left.min(self.while_decoding);", "            tokens.fill(0); left = self.room;"),
    ], [AGENDA]),
    ("decoding_holds_up_prompts", "crates/rill/src/scheduler/agenda.rs", [
        ("let kept = usize::from(!prefilling.is_empty());", "let kept = 0;"),
    ], [AGENDA]),
    ("a_request_waits_for_no_room", "crates/rill/src/scheduler/worker.rs", [
        ("                Err(_) if !self.running.is_empty() => at += 1,\n", ""),
        ("match since.elapsed() < self.patience {", "match since.elapsed() < 0 * self.patience {"),
    ], [SCHEDULER]),
    ("all_bear_the_fault_of_one", "crates/rill/src/scheduler/worker.rs", [
        ("Err(error) if taking_part == 1 => vec![Err(error)].into_iter(),",
         "Err(_) => (0..taking_part).map(|_| Err(Error::Cancelled)).collect::<Vec<_>>().into_iter(),"),
    ], [SCHEDULER]),
    ("cancelled_after_all_layers", "crates/rill/src/scheduler/worker.rs", [
        ("        if self.reason().is_some() {", "        if self.reason().is_some() && false {"),
    ], [SCHEDULER]),
    ("one_panic_for_all", "crates/rill/src/scheduler/worker.rs", [
        ("catch_unwind(AssertUnwindSafe(|| ask(&mut self.inner))).ok()", "Some(ask(&mut self.inner))"),
    ], [SCHEDULER]),
    ("beginnings_of_anybody", "crates/rill/src/prefix.rs", [
        ("*entry.namespace == *namespace && ", "(namespace.len() < usize::MAX || *entry.namespace == *namespace) && "),
    ], [SCHEDULER]),
    ("a_beginning_that_only_looks_alike", "crates/rill/src/prefix.rs", [
        ("tokens.starts_with(seen)", "tokens.first() == seen.first()"),
    ], [SCHEDULER]),
    ("a_beginning_of_another_name_space_is_used", "crates/rill/src/prefix/name.rs", [
        ("Hmac::new_from_slice(namespace.as_bytes())", "Hmac::new_from_slice(&namespace.as_bytes()[..0])"),
    ], [PREFIXES]),
    ("a_beginning_under_any_name", "crates/rill/src/prefix/disk.rs", [
        ("== tokens[..name.tokens] && note == name.to_string()", "== tokens[..name.tokens] && note != \"\""),
    ], [PREFIXES]),
    ("beginnings_that_fill_the_disk", "crates/rill/src/prefix/disk.rs", [
        ("kept.age() <= *max_age && total.saturating_add(room) <= *max_bytes", "kept.age() <= *max_age"),
        ("        total.saturating_add(room) <= *max_bytes\n", "        true\n"),
    ], [PREFIXES]),
    ("a_damaged_file_is_believed", "crates/rill/src/saved.rs", [
        ("if u64::from_le_bytes(sum) != found {", "if false && u64::from_le_bytes(sum) != found {"),
    ], [SAVED, PREFIXES]),
    ("a_session_for_any_weights", "crates/rill/src/saved.rs", [
        ("if head.model != model {", "if false && head.model != model {"),
    ], [SAVED, PREFIXES]),
    ("a_file_goes_before_the_next_is_whole", "crates/rill-stream/src/files.rs", [
        ("        let aside = create_aside(", "        let _ = fs::remove_file(&path);\n        let aside = create_aside("),
    ], [FILES, SAVED]),
    ("a_living_writer_is_cleared_away", "crates/rill-stream/src/files.rs", [
        ("file.try_lock().is_ok() && ", "file.metadata().is_ok() && "),
    ], [FILES]),
    ("inputs_beyond_the_last_sixteen_forgotten", "crates/rill-kernels/src/lanes.rs", [
        ("ragged::<F, R, V>(rows, x, at, end);", "ragged::<F, R, V>(rows, x, at, at);"),
    ], [KERNELS, PRODUCTS]),
    ("short_read_accepted", "crates/rill-stream/src/storage/mod.rs", [
        ("Ok(0) => return Err(short()),", "Ok(0) => return Ok(()),"),
    ], [CACHE]),
    ("record_given_up_while_it_is_used", "crates/rill-stream/src/cache.rs", [
        ("entry.keep == Keep::Loose && entry.waiting == 0 && !entry.is_reading()",
         "entry.keep == Keep::Loose && !entry.is_reading()"),
    ], [CACHE]),
    ("overlap_where_there_should_be_none", "crates/rill-stream/src/cache.rs", [
        ("let wait = !self.options.overlap && ", "let wait = false && "),
    ], [CACHE]),
    ("record_not_checked", "crates/rill/src/streamed.rs", [
        ("self.records.check(layer, expert, self.verify, record).map_err(ExpertError::Read)?;",
         "let _ = self.verify;"),
    ], [CONTAINERS]),
    ("trunk_run_not_checked", "crates/rill/src/trunk.rs", [
        ("source.check_run(layer, run.joined())?;", "let _ = (source, layer, run);"),
    ], [CONTAINERS]),
    ("ledger_without_a_ceiling", "crates/rill-stream/src/ledger.rs", [
        (".filter(|total| *total <= budget_bytes)", ".filter(|_| true)"),
    ], [BUDGETS, "-p rill-stream --lib"]),
    ("ring_delivers_the_layer_before", "crates/rill/src/trunk.rs", [
        ("let unit = self.units[index].clone();\n        let placement = unit.placement.clone();\n"
         "        state.counters", "let unit = self.units[index.saturating_sub(1)].clone();\n"
         "        let placement = unit.placement.clone();\n        state.counters"),
    ], [BUDGETS]),
    ("experts_expanded_before_use", "crates/rill-kernels/src/table.rs", [
        ("        assert_eq!(cols, w.cols());\n        assert_eq!(out.len(), w.rows() * n);",
         "        let expanded = vec![0.0f32; w.rows() * cols]; "
         "assert_eq!(std::hint::black_box(&expanded).len(), w.rows() * cols);\n"
         "        assert_eq!(cols, w.cols());\n        assert_eq!(out.len(), w.rows() * n);"),
    ], ["-p rill-kernels --test packed"]),
    ("typed_markup_becomes_structure", "crates/rill-text/src/chat.rs", [
        ("Text(text) => ids.extend(t.encode_text(text)),",
         "Text(text) => ids.extend(t.encode_markup(text)),"),
    ], ["-p rill-text"]),
    ("foreign_session_accepted", "crates/rill/src/step.rs", [
        ("if !session.belongs_to(&self.home) {", "if false && !session.belongs_to(&self.home) {"),
    ], [HOSTILE]),
]


def cargo_test(arguments):
    command = ["cargo", "test", "--release", "--locked", "--no-fail-fast", *arguments.split()]
    result = subprocess.run(
        command, cwd=TREE, capture_output=True, text=True,
        env={**os.environ, "CARGO_TARGET_DIR": str(BUILD)},
    )
    return result.returncode, result.stdout + result.stderr


def check_out():
    if TREE.exists():
        subprocess.run(["git", "checkout", "-q", "--detach", "-f", head()], cwd=TREE, check=True)
    else:
        TREE.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", str(TREE), "HEAD"], cwd=ROOT, check=True
        )


def head():
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()


def spring(file, edits, tests):
    """Applies one fault; returns what went wrong, or None when every named test noticed."""
    originals, texts = {}, {}
    for old, new, *elsewhere in edits:
        path = TREE / (elsewhere[0] if elsewhere else file)
        originals.setdefault(path, path.read_text(encoding="utf-8"))
        text = texts.get(path, originals[path])
        if text.count(old) != 1:
            return f"{path.name} holds this text {text.count(old)} times instead of once: {old!r}"
        texts[path] = text.replace(old, new)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    try:
        for test in tests:
            code, output = cargo_test(test)
            if "could not compile" in output:
                return f"does not compile:\n{output[-2000:]}"
            if code == 0:
                return f"`cargo test {test}` did not notice"
            if "test result: FAILED" not in output and "signal" not in output:
                return f"`cargo test {test}` failed without failing a test:\n{output[-2000:]}"
    finally:
        for path, original in originals.items():
            path.write_text(original, encoding="utf-8")
    return None


def main():
    wanted = sys.argv[1:]
    unknown = set(wanted) - {fault[0] for fault in FAULTS}
    if unknown:
        print(f"no fault named {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    check_out()
    failed = 0
    chosen = [fault for fault in FAULTS if not wanted or fault[0] in wanted]
    for test in sorted({test for fault in chosen for test in fault[3]}):
        code, output = cargo_test(test)
        if code != 0:
            print(f"`cargo test {test}` fails without any fault:\n{output[-3000:]}")
            return 1
    for name, file, edits, tests in chosen:
        problem = spring(file, edits, tests)
        print(f"{'ok  ' if problem is None else 'FAIL'} {name}", problem or "", flush=True)
        failed += problem is not None
    print(f"{len(chosen) - failed} of {len(chosen)} faults noticed by every test that should")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
