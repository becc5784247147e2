//! Text in and out of the model: [`Tokenizer`] and [`Utf8Stream`]. Knows nothing of weights.

mod bpe;
mod error;
mod pretokenize;
mod tokenizer;
mod utf8;

pub use error::TextError;
pub use tokenizer::Tokenizer;
pub use utf8::Utf8Stream;
