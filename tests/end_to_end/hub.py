"""What a hub's cache holds of the models and the data set that the real recipes name: the same forms, shrunk."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

# GSM8K's form: work with a calculator's notes in it, the answer behind a mark
SOLUTION = "{name} has {a} and gets {b}, so {a}+{b}=<<{a}+{b}={c}>>{c} apples.\nThat is all.\n#### {c}"
QUESTION = "{name} has {a} apples and gets {b} more. How many apples does {name} have now?"

CHAT_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def rows(count: int, seed: int) -> list[dict[str, str]]:
    """`count` questions in GSM8K's schema, different ones for different seeds."""
    random = Random(seed)
    made = []
    for number in range(count):
        a, b = random.randint(1, 4), random.randint(1, 4)
        parts = {"name": f"{'Ann' if seed else 'Bob'}{number}", "a": a, "b": b, "c": a + b}
        made.append({"question": QUESTION.format(**parts), "answer": SOLUTION.format(**parts)})
    return made


def add_data(hub: Path, revision: str, counts: dict[str, int]) -> None:
    """openai/gsm8k at `revision`, with so many rows per split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory = hub / "datasets--openai--gsm8k" / "snapshots" / revision / "main"
    directory.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(counts.items()):
        pq.write_table(pa.Table.from_pylist(rows(count, seed)), directory / f"{split}-00000-of-00001.parquet")


def add_model(hub: Path, name: str, revision: str, hidden: int, layers: int) -> None:
    """A small Qwen3 model, taught a little, and a byte-level tokenizer with Qwen3's special tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["question"] + row["answer"] for row in rows(50, 0)], trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    config = Qwen3Config(
        vocab_size=len(fast) + 30,  # more rows than tokens, as Qwen3's embedding has
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=2 * hidden,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
        pad_token_id=fast.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    _teach(model, fast)
    directory = hub / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    model.to(torch.bfloat16).save_pretrained(directory)
    fast.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "eos_token_id": [2, 0]}')


def _teach(model: Any, tokenizer: Any) -> None:
    """So many steps that some answers are right: there must be something to prefer and to reinforce."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    examples = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], add_generation_prompt=True, tokenize=False
        )
        + f"<think>{row['answer'][-1]}</think>{row['answer'][-1]}<|im_end|>"
        for row in rows(200, 0)
    ]
    random = Random(0)
    for _ in range(120):
        batch = tokenizer(random.sample(examples, 16), padding=True, return_tensors="pt", padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
