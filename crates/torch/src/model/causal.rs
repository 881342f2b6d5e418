//! The causal language models of transformers as a training loop sees them: they differ in what becomes of the ids and in how
//! logits are made, and are alike in the rest.

use super::liger::LigerLoss;
use super::module::Builder;
use crate::eager::op::{creation, liger, loss, view};
use crate::eager::training::Program;
use crate::eager::{Context, DType, Line, Tensor};

/// A model without its loss.
pub(super) trait CausalModel {
    fn context(&self) -> &Context;

    fn vocabulary(&self) -> u64;

    /// The last hidden state.
    fn transform(&self, ids: &Tensor) -> Tensor;

    fn logits(&self, hidden: &Tensor) -> Tensor;

    /// The weight by which logits are made, where Liger may take it from the model.
    fn head(&self) -> Option<&Tensor> {
        None
    }

    fn loss_line(&self) -> &'static Line;

    /// Weights of `nn.Embedding`.
    fn embeddings(&self) -> Vec<Tensor>;
}

/// A model with its loss.
pub(super) struct CausalLanguageModel<M> {
    model: M,
    batch: [u64; 2],
    trainable: Vec<Tensor>,
    loss: LigerLoss,
}

impl<M: CausalModel> CausalLanguageModel<M> {
    /// Of a model that is whole, adapters included.
    pub fn new(model: M, builder: &Builder, batch: [u64; 2]) -> CausalLanguageModel<M> {
        CausalLanguageModel {
            model,
            batch,
            trainable: builder.trainable(),
            loss: builder.liger.loss(),
        }
    }

    /// Loss and logits; a loss that takes the head's place has none.
    fn run(
        &self,
        ids: &Tensor,
        labels: &Tensor,
        items: Option<&Tensor>,
    ) -> (Tensor, Option<Tensor>) {
        let model = &self.model;
        let hidden = model.transform(ids);
        if let (LigerLoss::FusedLinear, Some(head)) = (self.loss, model.head()) {
            let kept = view::alias(&hidden);
            let loss = liger::causal_language_model(&kept, head, labels, items);
            drop(hidden);
            drop(kept);
            return (loss, None);
        }
        let logits = model.logits(&hidden);
        model.context().at(model.loss_line());
        let cross_entropy: loss::CrossEntropy = match self.loss {
            LigerLoss::CrossEntropy => liger::cross_entropy,
            _ => |logits: &Tensor, target: &Tensor| loss::cross_entropy(logits, target),
        };
        let loss =
            loss::causal_language_model(&logits, labels, model.vocabulary(), items, cross_entropy);
        drop(hidden);
        (loss, Some(logits))
    }
}

impl<M: CausalModel> Program for CausalLanguageModel<M> {
    fn batch(&self) -> Vec<Tensor> {
        let context = self.model.context();
        vec![creation::filled(context, self.batch, DType::Int64)]
    }

    fn loss(&self, batch: &[Tensor]) -> Tensor {
        self.run(&batch[0], &batch[0], None).0
    }

    fn outputs(
        &self,
        ids: &Tensor,
        labels: &Tensor,
        items: Option<&Tensor>,
    ) -> Option<(Tensor, Option<Tensor>)> {
        Some(self.run(ids, labels, items))
    }

    fn embeddings(&self) -> Vec<Tensor> {
        self.model.embeddings()
    }

    fn trainable(&self) -> Vec<Tensor> {
        self.trainable.clone()
    }
}
