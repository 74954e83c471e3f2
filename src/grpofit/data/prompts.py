"""Prompts: from rows to what the model reads, and which of them a step takes.

Owns the prompt text of a row, chat templates, tokenisation, the length filter and the order of prompts. Must not
know where rows come from, nor rewards. The tokenizer is a parameter; this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpofit.config.tree import TaskConfig
from grpofit.data.keyed import keyed_rng
from grpofit.data.templates import RowTemplate
from grpofit.errors import DataError
from grpofit.types import Prompt

_ARITHMETIC_PROMPT = "What is {{ question }}? Answer with only the number."
_QUESTION_PROMPT = "{{ question }}"
_TEMPLATE_ARGUMENTS = ("tokenize", "add_generation_prompt", "continue_final_message", "return_tensors", "return_dict")
_BATCH = 1024

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a split.

    Attributes:
        prompts: those within the limit, in row order; `row_id` is the row's index before filtering.
        dropped: prompts over the limit, left out.
        longest_tokens: of the prompts kept.
        chat: whether the chat template was applied.
    """

    prompts: list[Prompt]
    dropped: int
    longest_tokens: int
    chat: bool


def prompt_template(config: TaskConfig) -> RowTemplate | None:
    """The template of `task.prompt`, or the task's own; None where the row's `prompt` column is used."""
    if config.prompt is not None:
        return RowTemplate(config.prompt, "task.prompt")
    if config.name is None:
        return None
    return RowTemplate(_ARITHMETIC_PROMPT if config.name == "arithmetic" else _QUESTION_PROMPT, "task.prompt")


def check_prompt(row: Mapping[str, Any], template: RowTemplate | None, where: str) -> str | Messages:
    """The prompt of a row: the rendered template, or its `prompt` column, text or messages.

    Raises:
        DataError: no `prompt`, an empty one, or one that is neither text nor messages; `where` names the row.
    """
    prompt = template.render(row, where) if template is not None else row.get("prompt")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return [dict(message) for message in prompt]
    missing = prompt is None or prompt in ("", [])
    raise DataError(
        f"{where} has no prompt" if missing else f"the prompt of {where} is neither text nor a list of messages",
        values=f"columns: {', '.join(map(str, row)) or '(none)'}" + ("" if missing else f"; prompt: {prompt!r:.200}"),
        why="there is nothing to complete",
        fix='add a column "prompt": text, or [{"role": "user", "content": "..."}];\n'
        "or build it from other columns: --set 'task.prompt=\"{{ question }}\"'",
    )


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def build_prompts(
    rows: Sequence[Mapping[str, Any]], config: TaskConfig, tokenizer: Any, max_prompt_tokens: int
) -> PromptSet:
    """Template, tokenise and filter the rows of a split.

    A chat template writes its own special tokens, so its text is tokenised without adding any. Bare text gets what
    the tokenizer adds of itself. A BOS token is never doubled, nor added where neither of them adds one.

    Args:
        rows: from `load_task`; their other columns become `Prompt.columns`.
        tokenizer: of transformers.
        max_prompt_tokens: longer prompts are left out and counted, never cut.

    Raises:
        DataError: a row without a prompt, a chat template that is missing or refuses the messages, or no prompt
            within the limit.
    """
    template = prompt_template(config)
    contents = [check_prompt(row, template, f"row {index + 1}") for index, row in enumerate(rows)]
    chat = _uses_chat(config, tokenizer, contents)
    messages = [_messages(content, config.system, index) if chat else content for index, content in enumerate(contents)]
    texts = [m if isinstance(m, str) else _chat_text(m, config, tokenizer, i) for i, m in enumerate(messages)]
    token_ids = _tokenise(texts, tokenizer, chat)
    prompts = [
        Prompt(
            row_id=index,
            text=texts[index],
            messages=messages[index],
            token_ids=ids,
            columns={column: value for column, value in row.items() if column != "prompt"},
            conversational=not isinstance(contents[index], str),
        )
        for index, (row, ids) in enumerate(zip(rows, token_ids, strict=True))
        if len(ids) <= max_prompt_tokens
    ]
    if not prompts:
        shortest = min(map(len, token_ids), default=0)
        raise DataError(
            "no prompt is short enough",
            values=f"{len(rows)} prompts, the shortest has {shortest} tokens; the limit is {max_prompt_tokens}",
            why="prompts over the limit are left out, since a cut prompt asks another question",
            fix=f"--set rollout.max_prompt_tokens={max(shortest, max(map(len, token_ids), default=1))}",
        )
    return PromptSet(prompts, len(rows) - len(prompts), max(len(prompt.token_ids) for prompt in prompts), chat)


def _uses_chat(config: TaskConfig, tokenizer: Any, contents: Iterable[str | Messages]) -> bool:
    has_template = bool(tokenizer.chat_template)
    if config.template == "chat" or (config.template == "auto" and has_template):
        needed_by = "task.template is chat" if config.template == "chat" else ""
    else:
        conversational = any(not isinstance(content, str) for content in contents)
        needed_by = "the rows' prompts are lists of messages" if conversational else ""
        needed_by = needed_by or ("task.system is set" if config.system else "")
        if not needed_by:
            return False
    if has_template and config.template != "none":
        return True
    raise DataError(
        "a chat template is needed and there is none",
        values=f"{needed_by}; " + ("task.template is none" if has_template else "the tokenizer has no chat template"),
        why="how roles and turns are written is a convention that the model was trained on",
        fix="--set task.template=chat"
        if has_template
        else "write the whole prompt as text: --set task.template=none, task.system unset, and "
        "task.prompt with everything the model should read; or take an instruction-tuned model",
    )


def _messages(content: str | Messages, system: str | None, index: int) -> Messages:
    messages: Messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise DataError(
            f"row {index + 1} has a system message of its own",
            values=f"task.system is {system!r:.100}",
            why="one of the two would be lost",
            fix="remove task.system, or the system messages of the rows",
        )
    return [{"role": "system", "content": system}, *messages]


def _chat_text(messages: Messages, config: TaskConfig, tokenizer: Any, index: int) -> str:
    if clash := sorted(set(config.chat_template_kwargs) & set(_TEMPLATE_ARGUMENTS)):
        raise DataError(
            f"task.chat_template_kwargs may not set {', '.join(clash)}",
            values=f"{config.chat_template_kwargs}",
            why="how the template is applied is fixed: as text, open for the model's turn",
            fix=f"remove {', '.join(clash)} from task.chat_template_kwargs",
        )
    # A conversation that ends with the assistant's words is a beginning that the model goes on writing.
    prefilled = messages[-1]["role"] == "assistant"
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                **config.chat_template_kwargs,
            )
        )
    except Exception as error:  # a chat template is a program of the model's author and may raise anything
        raise DataError(
            f"the tokenizer's chat template refuses row {index + 1}",
            values=f"{type(error).__name__}: {error}; roles: {', '.join(message['role'] for message in messages)}",
            why="the model would not see the prompt it was trained to see",
            fix="remove what the template does not know (often the system role: put its text into task.prompt),\n"
            "or correct task.chat_template_kwargs",
        ) from error


def _tokenise(texts: list[str], tokenizer: Any, chat: bool) -> list[tuple[int, ...]]:
    result: list[tuple[int, ...]] = []
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        for offset, text in enumerate(batch):
            _refuse_half_characters(text, start + offset)
        encoded = tokenizer(batch, add_special_tokens=not chat, truncation=False, padding=False, verbose=False)
        result += [tuple(ids) for ids in encoded["input_ids"]]
    # A template, or a text written by hand, may hold the BOS token that the tokenizer adds as well.
    bos = getattr(tokenizer, "bos_token_id", None)
    return [ids[1:] if bos is not None and ids[:2] == (bos, bos) else ids for ids in result]


def _refuse_half_characters(text: str, index: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the prompt of row {index + 1} holds half a character",
            values=f"{error.object[error.start : error.end]!r} at character {error.start} of {text!a:.80}",
            why="a lone surrogate is no text, so it has no tokens",
            fix="correct the row: such characters come from text that was cut, or escaped as JSON, in the wrong place",
        ) from None


def prompts_for_step(prompts: Sequence[Prompt], count: int, seed: int, step: int) -> list[Prompt]:
    """The `count` prompts of a step (0-based), a function of its arguments alone.

    Every epoch shuffles all prompts under the key (seed, epoch) and is cut into whole steps; prompts that do not
    fill another step wait for the next epoch, so that no prompt stands twice in a step. With fewer prompts than
    `count`, a step takes all of them as often as it can, and the rest from one more shuffle.
    """
    steps_per_epoch = len(prompts) // count
    if steps_per_epoch:
        epoch, place = divmod(step, steps_per_epoch)
        order = keyed_rng(seed, epoch).permutation(len(prompts))
        return [prompts[index] for index in order[place * count : (place + 1) * count]]
    epochs_per_step = -(-count // len(prompts))
    first = step * epochs_per_step
    orders = (keyed_rng(seed, epoch).permutation(len(prompts)) for epoch in range(first, first + epochs_per_step))
    return [prompts[index] for order in orders for index in order][:count]
