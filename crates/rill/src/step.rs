//! The forward pass: one step of one session or of many.
//!
//! All rows of a step pass through a layer together, so that its matrices, and the experts that any of
//! them chose, are read once. No row sees another session's: a session's bits do not depend on its
//! company.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::Instant;

use rill_stream::Lease;

use crate::engine::Engine;
use crate::error::Error;
use crate::experts::LayerIdx;
use crate::session::{LayerState, Session};
use crate::trunk::{Linear, UnitBytes};
use crate::weights::{Attention, Ffn, Layer};
use crate::{kda, mla, moe, residual};

/// Rows of the head that are multiplied at a time.
const HEAD_ROWS: usize = 8192;

/// Which positions to compute logits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: the tokens are only taken in.
    None,
    /// The last token given: (vocab).
    Last,
    /// Every token given: (tokens, vocab).
    All,
}

impl Logits {
    fn positions(self, tokens: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last => 1,
            Self::All => tokens,
        }
    }
}

/// Looks on while a step runs. All methods have a default that does nothing.
pub trait Observer {
    /// A layer has finished for a chunk of tokens: `hidden` (tokens, hidden) is what the next
    /// layer will get, and may be replaced. Breaking ends the step for this session, with
    /// [`Error::Cancelled`] where there is no other.
    fn after_layer(&mut self, _layer: LayerIdx, _hidden: &mut [f32]) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }

    /// A router has chosen for one token: `ids` (top_k), ascending, which may be replaced by others
    /// that are ascending too. The step fails with [`Error::Routing`] if they are not.
    fn choose(&mut self, _layer: LayerIdx, _ids: &mut [u32]) {}

    /// A layer's experts are known: `ids` and `weights` (tokens, top_k), ascending ids within a token.
    fn routed(&mut self, _layer: LayerIdx, _ids: &[u32], _weights: &[f32]) {}

    /// The final norm has run: `hidden` (positions, hidden) is what the head will get, for the
    /// positions whose logits were asked for.
    fn normed(&mut self, _hidden: &[f32]) {}
}

impl Observer for () {}

/// What one session takes to a step.
pub struct Part<'a> {
    /// Whose tokens they are.
    pub session: &'a mut Session,
    /// What follows the tokens that the session has seen; at least one.
    pub tokens: &'a [u32],
    /// Which logits are wanted.
    pub logits: Logits,
    /// Sees this session's rows and nobody else's.
    pub observer: &'a mut (dyn Observer + Send),
}

impl Engine {
    /// Runs tokens through the model and returns logits.
    ///
    /// The result does not depend on how tokens are divided into calls. After an error the
    /// session stands at the last whole token that was taken; [`Session::position`] tells which,
    /// and both session and engine can be used again.
    ///
    /// Calls from several threads take turns, a piece of a prompt or a token each: a step uses
    /// every core, and there is memory for the activations of one. To have sessions share steps, use
    /// a [`Scheduler`](crate::Scheduler). An observer cannot run the engine that it looks on.
    pub fn forward(
        &self,
        session: &mut Session,
        tokens: &[u32],
        logits: Logits,
    ) -> Result<Vec<f32>, Error> {
        self.forward_observed(session, tokens, logits, &mut ())
    }

    /// [`forward`](Self::forward) with an observer.
    pub fn forward_observed(
        &self,
        session: &mut Session,
        tokens: &[u32],
        logits: Logits,
        observer: &mut (dyn Observer + Send),
    ) -> Result<Vec<f32>, Error> {
        self.check_tokens(session, tokens)?;
        session.admit()?;
        let positions = logits.positions(tokens.len());
        let _lease = self.lease_logits(positions)?;
        // Exactly, because growth by doubling would take twice as much.
        let mut out = [Vec::with_capacity(positions * self.config.vocab_size)];
        let mut rest = tokens;
        while !rest.is_empty() {
            let (chunk, later) = rest.split_at(rest.len().min(self.plan.prefill_chunk));
            rest = later;
            let logits =
                if logits == Logits::Last && !rest.is_empty() { Logits::None } else { logits };
            let mut part =
                [Part { session: &mut *session, tokens: chunk, logits, observer: &mut *observer }];
            let done = self.turn(&mut part, &mut out, tokens.len())?;
            if !done[0] {
                return Err(Error::Cancelled);
            }
        }
        let [out] = out;
        Ok(out)
    }

    /// Takes one step with several sessions: each gets the logits it asked for, or nothing if its
    /// observer stopped it, which leaves it where it was. Each session's results have the bits that it
    /// would have gotten alone.
    ///
    /// # Errors
    /// Any of [`forward`](Self::forward) for any of the sessions, and [`Error::StepTooLarge`] when
    /// they have more tokens together than [`Plan::prefill_chunk`](crate::plan::Plan::prefill_chunk).
    /// All sessions are where they were then.
    pub fn step(&self, parts: &mut [Part<'_>]) -> Result<Vec<Option<Vec<f32>>>, Error> {
        let (mut tokens, mut longest, mut positions) = (0, 0, 0);
        for part in &*parts {
            self.check_tokens(part.session, part.tokens)?;
            tokens += part.tokens.len();
            longest = longest.max(part.tokens.len());
            positions += part.logits.positions(part.tokens.len());
        }
        if tokens > self.plan.prefill_chunk {
            return Err(Error::StepTooLarge { tokens, most: self.plan.prefill_chunk });
        }
        for part in &mut *parts {
            part.session.admit()?;
        }
        let _lease = self.lease_logits(positions)?;
        let mut out = vec![Vec::new(); parts.len()];
        let done = self.turn(parts, &mut out, longest)?;
        Ok(done.into_iter().zip(out).map(|(done, logits)| done.then_some(logits)).collect())
    }

    fn lease_logits(&self, positions: usize) -> Result<Lease, Error> {
        let more = positions.saturating_sub(self.plan.options.logits) as u64;
        Ok(self.ledger.lease("logits", 4 * more * self.config.vocab_size as u64)?)
    }

    /// One step, in turn with those of other threads: appends each part's logits to its place in
    /// `out`, and tells which parts got to the end. With `longest` above 1 its time counts as that of a
    /// prompt.
    fn turn(
        &self,
        parts: &mut [Part<'_>],
        out: &mut [Vec<f32>],
        longest: usize,
    ) -> Result<Vec<bool>, Error> {
        let _turn = self.turns.wait();
        let given = self.relief.look(&*self.experts);
        if given > 0 {
            self.log
                .say(|| format!("the system pages: {given} expert slots were given back to it"));
        }
        let (start, before) = (Instant::now(), self.counters());
        // Inside the pool, so that the many small splits below need no hand-over.
        let step = self.compute.pool.install(|| {
            let mut rows = Rows::new(parts, self.config.hidden_size);
            let hidden = self.run_layers(&mut rows)?;
            self.head(&mut rows, &hidden, out)?;
            Ok(rows.parts.iter().map(|rows| rows.part).collect::<Vec<_>>())
        });
        let finished = step.inspect_err(|_: &Error| {
            for part in &mut *parts {
                part.session.roll_back();
            }
        })?;
        let mut done = vec![false; parts.len()];
        for part in finished {
            done[part] = true;
        }
        let tokens = parts.iter().zip(&done).filter(|(_, done)| **done);
        let tokens = tokens.map(|(part, _)| part.tokens.len()).sum();
        if tokens > 0 {
            self.paces.add(tokens, longest, start.elapsed());
        }
        let took = Arc::new(self.counters().since(&before));
        for (part, &done) in parts.iter_mut().zip(&done) {
            if done {
                part.session.commit(part.tokens, took.clone());
            } else {
                part.session.roll_back();
            }
        }
        Ok(done)
    }

    pub(crate) fn check_tokens(&self, session: &Session, tokens: &[u32]) -> Result<(), Error> {
        if !session.belongs_to(&self.home) {
            return Err(Error::ForeignSession);
        }
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let vocab_size = self.config.vocab_size;
        if let Some(position) = tokens.iter().position(|&t| t as usize >= vocab_size) {
            return Err(Error::TokenOutOfRange { token: tokens[position], position, vocab_size });
        }
        let positions = session.position() + tokens.len();
        let max_positions = self.plan.options.context;
        if positions > max_positions {
            return Err(Error::ContextFull { positions, max_positions });
        }
        Ok(())
    }

    /// The trunk from embedding to last layer: (rows, hidden), output mix included.
    fn run_layers(&self, rows: &mut Rows<'_, '_>) -> Result<Vec<f32>, Error> {
        let config = &*self.config;
        let mut stream = Stream { x: self.embed(rows)?, blocks: Vec::new() };
        for (index, layer) in self.weights.layers.iter().enumerate() {
            let matrices = self.trunk.layer(index)?;
            match config.attn_res_block_size {
                None => self.plain_layer(index, layer, &matrices, rows, &mut stream.x)?,
                Some(size) => {
                    let starts_block = index % size == 0;
                    self.mixed_layer(index, layer, &matrices, rows, &mut stream, starts_block)?;
                }
            }
            rows.after_layer(LayerIdx(index), &mut stream);
            if rows.parts.is_empty() {
                return Ok(Vec::new());
            }
        }
        let Stream { x, blocks } = stream;
        Ok(match &self.weights.output_mix {
            None => x,
            Some(weights) => {
                residual::mix(&self.compute.kernels, config.rms_norm_eps, weights, &blocks, &x)
            }
        })
    }

    /// `x += attn(rms(x)); x += ffn(rms(x))`.
    fn plain_layer(
        &self,
        index: usize,
        layer: &Layer,
        matrices: &UnitBytes,
        rows: &mut Rows<'_, '_>,
        x: &mut [f32],
    ) -> Result<(), Error> {
        let kernels = &self.compute.kernels;
        let attention = self.attention(index, layer, matrices, rows, x);
        kernels.add(&attention, x);
        let ffn = self.ffn(index, layer, matrices, rows, x)?;
        kernels.add(&ffn, x);
        Ok(())
    }

    /// A layer with attention residuals: each half reads a mix of the stored blocks and the
    /// running prefix; the first layer of a block sets the prefix aside and starts a new one.
    fn mixed_layer(
        &self,
        index: usize,
        layer: &Layer,
        matrices: &UnitBytes,
        rows: &mut Rows<'_, '_>,
        Stream { x: prefix, blocks }: &mut Stream,
        starts_block: bool,
    ) -> Result<(), Error> {
        let kernels = &self.compute.kernels;
        let eps = self.config.rms_norm_eps;
        let (attention_mix, ffn_mix) =
            layer.mixes.as_ref().expect("bound whenever there is a block size");

        let attention = if blocks.is_empty() {
            self.attention(index, layer, matrices, rows, prefix)
        } else {
            let x = residual::mix(kernels, eps, attention_mix, blocks, prefix);
            self.attention(index, layer, matrices, rows, &x)
        };
        if starts_block {
            blocks.push(std::mem::replace(prefix, attention));
        } else {
            kernels.add(&attention, prefix);
        }
        let x = residual::mix(kernels, eps, ffn_mix, blocks, prefix);
        let ffn = self.ffn(index, layer, matrices, rows, &x)?;
        kernels.add(&ffn, prefix);
        Ok(())
    }

    /// `attn(rms(x))`.
    fn attention(
        &self,
        index: usize,
        layer: &Layer,
        matrices: &UnitBytes,
        rows: &mut Rows<'_, '_>,
        x: &[f32],
    ) -> Vec<f32> {
        let (compute, config) = (&self.compute, &*self.config);
        let x = compute.rms_norm(x, &layer.input_layernorm, config.rms_norm_eps);
        match &layer.attention {
            Attention::Kda(w) => {
                let mut states = rows.states(index, LayerState::kda);
                kda::forward(compute, config, w, matrices, &mut states, &x)
            }
            Attention::Mla(w) => {
                let mut states = rows.states(index, LayerState::mla);
                mla::forward(compute, config, w, matrices, &mut states, &x)
            }
        }
    }

    /// `ffn(rms(x))`.
    fn ffn(
        &self,
        index: usize,
        layer: &Layer,
        matrices: &UnitBytes,
        rows: &mut Rows<'_, '_>,
        x: &[f32],
    ) -> Result<Vec<f32>, Error> {
        let (compute, config) = (&self.compute, &*self.config);
        let (raw, n) = (x, x.len() / config.hidden_size);
        let x = compute.rms_norm(x, &layer.post_attention_layernorm, config.rms_norm_eps);
        match &layer.ffn {
            Ffn::Dense(mlp) => Ok(moe::dense(compute, config.activation, mlp, matrices, &x, n)),
            Ffn::Moe(weights) => {
                let (experts, index) = (&*self.experts, LayerIdx(index));
                if n == 1 && self.lookahead > 0 {
                    self.look_ahead(index.0 + 1, raw);
                }
                let mut choose = |row, ids: &mut [u32]| rows.observer_of(row).choose(index, ids);
                let (y, routing) = moe::forward(
                    compute,
                    config,
                    weights,
                    matrices,
                    experts,
                    index,
                    &x,
                    n,
                    &mut choose,
                )?;
                rows.routed(index, &routing, config.moe.top_k);
                Ok(y)
            }
        }
    }

    /// Asks the next layer's router about what this layer's router sees: it names most of the
    /// experts that will be wanted, early. `x` (hidden). Whether it is right changes no result.
    fn look_ahead(&self, next: usize, x: &[f32]) {
        let (compute, config) = (&self.compute, &*self.config);
        let Some(layer) = self.weights.layers.get(next) else { return };
        let Ffn::Moe(weights) = &layer.ffn else { return };
        // A router that is still being read cannot be asked.
        let Some(matrices) = self.trunk.layer_if_present(next) else { return };
        let x = compute.rms_norm(x, &layer.post_attention_layernorm, config.rms_norm_eps);
        let mut scores = compute.matmul(matrices.view(weights.gate), &x, 1);
        compute.kernels.sigmoid(&mut scores);
        let likely = moe::likeliest(&scores, &weights.e_score_correction_bias, self.lookahead);
        self.experts.likely(LayerIdx(next), &likely);
    }

    /// Rows of the embedding, (rows, hidden), read from disk.
    fn embed(&self, rows: &Rows<'_, '_>) -> Result<Vec<f32>, Error> {
        let mut x = Vec::with_capacity(rows.n * self.config.hidden_size);
        for &token in rows.parts.iter().flat_map(|rows| rows.tokens) {
            x.extend(self.source.read_row(&self.weights.embed_tokens, u64::from(token))?);
        }
        Ok(x)
    }

    /// Final norm and head for the positions whose logits are wanted, (positions, vocab), appended to
    /// each part's place in `out`. `x` (rows, hidden).
    fn head(&self, rows: &mut Rows<'_, '_>, x: &[f32], out: &mut [Vec<f32>]) -> Result<(), Error> {
        let (compute, config) = (&self.compute, &*self.config);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let mut wanted = Vec::new();
        let mut logits = Vec::new();
        for (out, rows) in rows.with_places(out) {
            let positions = rows.logits.positions(rows.tokens.len());
            if positions > 0 {
                let last = &x[(rows.range.end - positions) * hidden..rows.range.end * hidden];
                let start = wanted.len();
                wanted.extend(compute.rms_norm(last, &self.weights.norm, config.rms_norm_eps));
                rows.observer.normed(&wanted[start..]);
                let start = out.len();
                out.reserve_exact(positions * vocab);
                out.resize(start + positions * vocab, 0.0);
                logits.extend(out[start..].chunks_exact_mut(vocab));
            }
        }
        let n = wanted.len() / hidden;
        if n == 0 {
            return Ok(());
        }
        for (piece, &(first, rows)) in self.trunk.head_rows().iter().enumerate() {
            let matrices = self.trunk.head(piece)?;
            let head = matrices.view(Linear(0));
            // Some rows at a time, so that hardly more memory is needed than for the result.
            for at in (0..rows).step_by(HEAD_ROWS) {
                let range = at..rows.min(at + HEAD_ROWS);
                let part = compute.matmul(head.row_range(range.clone()), &wanted, n);
                let parts = part.chunks_exact(range.len());
                for (logits, part) in logits.iter_mut().zip(parts) {
                    logits[first + range.start..first + range.end].copy_from_slice(part);
                }
            }
        }
        Ok(())
    }
}

/// What flows through the layers, a row for each token.
struct Stream {
    /// (rows, hidden)
    x: Vec<f32>,
    /// Attention residuals: sums set aside so far, (rows, hidden) each.
    blocks: Vec<Vec<f32>>,
}

/// The rows of a step and whose they are.
struct Rows<'s, 'p> {
    parts: Vec<PartRows<'s, 'p>>,
    n: usize,
    hidden_size: usize,
}

/// The rows of a session that is still taking part.
struct PartRows<'s, 'p> {
    /// Index of its part.
    part: usize,
    range: Range<usize>,
    layers: &'s mut [LayerState],
    tokens: &'p [u32],
    logits: Logits,
    observer: &'s mut (dyn Observer + Send + 'p),
}

impl<'s, 'p> Rows<'s, 'p> {
    fn new(parts: &'s mut [Part<'p>], hidden_size: usize) -> Self {
        let mut n = 0;
        let rows = parts.iter_mut().enumerate().map(|(part, given)| {
            let start = n;
            n += given.tokens.len();
            PartRows {
                part,
                range: start..n,
                layers: &mut given.session.layers,
                tokens: given.tokens,
                logits: given.logits,
                observer: &mut *given.observer,
            }
        });
        Self { parts: rows.collect(), n, hidden_size }
    }

    /// Of each session, what it remembers of a layer and how many rows it has.
    fn states<'r, S>(
        &'r mut self,
        layer: usize,
        state: impl Fn(&'r mut LayerState) -> &'r mut S,
    ) -> Vec<(&'r mut S, usize)> {
        let parts = self.parts.iter_mut();
        parts.map(|rows| (state(&mut rows.layers[layer]), rows.range.len())).collect()
    }

    /// The sessions that are still taking part, with what belongs to each of `places` (parts).
    fn with_places<'r, T>(
        &'r mut self,
        places: &'r mut [T],
    ) -> impl Iterator<Item = (&'r mut T, &'r mut PartRows<'s, 'p>)> {
        let mut parts = self.parts.iter_mut().peekable();
        places.iter_mut().enumerate().filter_map(move |(part, place)| {
            parts.next_if(|rows| rows.part == part).map(|rows| (place, rows))
        })
    }

    fn observer_of(&mut self, row: usize) -> &mut (dyn Observer + Send + 'p) {
        let part = self.parts.partition_point(|rows| rows.range.end <= row);
        &mut *self.parts[part].observer
    }

    fn routed(&mut self, layer: LayerIdx, routing: &moe::Routing, top_k: usize) {
        for rows in &mut self.parts {
            let places = rows.range.start * top_k..rows.range.end * top_k;
            rows.observer.routed(layer, &routing.ids[places.clone()], &routing.weights[places]);
        }
    }

    /// Shows each observer its rows. Those of a session that is stopped are taken out.
    fn after_layer(&mut self, layer: LayerIdx, stream: &mut Stream) {
        let width = self.hidden_size;
        let mut stopped = Vec::new();
        self.parts.retain_mut(|rows| {
            let range = rows.range.start * width..rows.range.end * width;
            let goes_on =
                rows.observer.after_layer(layer, &mut stream.x[range.clone()]).is_continue();
            if !goes_on {
                stopped.push(range);
            }
            goes_on
        });
        // From the last to the first, so that the others stay where they are until then.
        for range in stopped.iter().rev() {
            for values in stream.blocks.iter_mut().chain([&mut stream.x]) {
                values.drain(range.clone());
            }
        }
        if !stopped.is_empty() {
            self.n = 0;
            for rows in &mut self.parts {
                rows.range = self.n..self.n + rows.range.len();
                self.n = rows.range.end;
            }
        }
    }
}
