//! Text in and out of the model: [`Tokenizer`], prompts for one question ([`chat`]), reply regions, and the two
//! streaming helpers a client needs to print a reply ([`Utf8Stream`], [`StopMatcher`]). Knows nothing of weights.

mod bpe;
pub mod chat;
mod error;
mod pretokenize;
mod stop;
mod tokenizer;
mod utf8;

pub use error::TextError;
pub use stop::{StopMatcher, StopStep};
pub use tokenizer::Tokenizer;
pub use utf8::Utf8Stream;
