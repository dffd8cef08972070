"""A causal language model fine-tuned on a text file: a stock script, as people have it, for test_two_line_diff.py."""

import logging
import math
import os
import sys
from dataclasses import dataclass, field
from itertools import chain

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model is fine-tuned."""

    model_name_or_path: str = field(metadata={"help": "Directory of the checkpoint."})
    dtype: str = field(default="auto", metadata={"help": "Load the weights in this dtype."})


@dataclass
class DataTrainingArguments:
    """Which text it learns."""

    train_file: str = field(metadata={"help": "Text to train on."})
    validation_file: str = field(metadata={"help": "Text to evaluate on."})
    block_size: int = field(default=32, metadata={"help": "Tokens in one example."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many examples only."})


def parse(parser):
    """Read flags, or one JSON or YAML file with all of them."""
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    if len(sys.argv) == 2 and sys.argv[1].endswith((".yaml", ".yml")):
        return parser.parse_yaml_file(yaml_file=os.path.abspath(sys.argv[1]))
    return parser.parse_args_into_dataclasses()


def group_texts(lines, tokenizer, block_size):
    """Return examples of ``block_size`` tokens over all lines, without the remainder."""
    tokens = list(chain.from_iterable(tokenizer(line)["input_ids"] for line in lines))
    starts = range(0, len(tokens) - block_size + 1, block_size)
    blocks = [tokens[start : start + block_size] for start in starts]
    return [{"input_ids": block, "attention_mask": [1] * block_size, "labels": list(block)} for block in blocks]


def read_examples(path, tokenizer, block_size):
    with open(path, encoding="utf-8") as file:
        return group_texts(file, tokenizer, block_size)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parse(parser)
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING, stream=sys.stdout)
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    set_seed(training_args.seed)

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir):
        last_checkpoint = get_last_checkpoint(training_args.output_dir)

    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config, dtype=model_args.dtype)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    train_dataset = read_examples(data_args.train_file, tokenizer, data_args.block_size)
    eval_dataset = read_examples(data_args.validation_file, tokenizer, data_args.block_size)
    if data_args.max_eval_samples is not None:
        eval_dataset = eval_dataset[: data_args.max_eval_samples]

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(eval_preds):
        predictions, labels = (torch.as_tensor(part) for part in eval_preds)
        return {"accuracy": (predictions[:, :-1] == labels[:, 1:]).float().mean().item()}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )

    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", train_result.metrics)
        trainer.save_metrics("train", train_result.metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
