"""The configuration tree: one typed, frozen section per concern, in the YAML shape users write.

Owns names, types, ranges and defaults of every key. `docs/config.md` is generated from the field docstrings here.
Must not know where a value came from (`resolve.py`), nor which rules join several fields (`rules.py`).

Maths keys (`task`, `rewards`, `rollout`, `algo`, `optim`, ...) decide what is trained. `memory.*` decides how it is
squeezed into memory and never changes the gradient.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Auto = Literal["auto"]


def _none_to_word(value: Any) -> Any:
    """YAML's `null` and `~` mean the same as the word `none`."""
    return "none" if value is None else value


NullIsNone = BeforeValidator(_none_to_word)
Units = Annotated[Annotated[int, Field(ge=1)] | Literal["auto", "none"], NullIsNone]
"""A memory knob that counts something: the planner's choice, everything at once, or a number."""


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, attribute docstrings are the help.

    Strict: no text becomes a number, no `1.5` or `true` an int. An int is a good float. No float may be inf or nan.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelConfig(Section):
    """Which policy is trained, and in which precision."""

    name: str = Field(min_length=1)
    """Hugging Face id, local folder, `.gguf` file, or the alias `smollm2-135m`. What begins with `./`, `../`, `~/` or
    `/`, or ends with `.gguf`, is a path, relative to the YAML that names it."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of weights and activations. `auto`: bfloat16."""
    master_dtype: Annotated[Literal["float32", "none"], NullIsNone] = "float32"
    """`float32` keeps full precision beside 16-bit weights, and the optimizer updates that; `none` updates the weights
    as they are, which at small learning rates rounds most updates away in bfloat16 (see `optim.rounding`)."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation. `auto`: sdpa."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Off unless asked."""


class TaskConfig(Section):
    """Where prompts come from. Exactly one of `name`, `file`, `dataset`."""

    name: str | None = None
    """`arithmetic`, `gsm8k`, or `reasoning_gym:<dataset>`."""
    file: str | None = None
    """A JSONL, CSV or parquet file; relative to the YAML that names it."""
    eval_file: str | None = None
    """Held-out rows for `file`; without it `eval_size` rows are split off by a hash of the row."""
    dataset: str | None = None
    """A Hugging Face dataset id, or a local dataset folder (write `./folder`; relative to the YAML)."""
    dataset_config: str | None = None
    """Configuration name of `dataset`."""
    split: str = "train"
    """Training split of `dataset`."""
    eval_split: str | None = None
    """Held-out split of `dataset`; without it `eval_size` rows are split off by a hash of the row."""
    prompt: str | None = None
    """Jinja template over the row's columns; without it the row's `prompt` column (text or messages) is used."""
    answer: str | None = None
    """Jinja template for the reference answer, handed to rewards as the column `answer`."""
    system: str | None = None
    """System message."""
    template: Annotated[Literal["auto", "chat", "none"], NullIsNone] = "auto"
    """`chat` applies the tokenizer's chat template, `none` gives the bare text; `auto`: chat where there is one."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, e.g. `{enable_thinking: false}`."""
    eval_size: int = Field(default=200, ge=1)
    """Held-out rows that evaluation uses."""
    train_size: int | None = Field(default=None, ge=1)
    """At most this many training rows; generated tasks make as many (default: all there are, at most 20000)."""
    split_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the split and generated rows. Separate from `run.seed`, so that seeds share one held-out set."""
    operations: Annotated[list[Literal["add", "sub", "mul"]], Field(min_length=1)] | None = None
    """`arithmetic`: which operations (default: add)."""
    terms: Annotated[tuple[int, int] | None, Field(strict=False)] = None
    """`arithmetic`: smallest and largest term (default: 1 and 20)."""
    options: dict[str, Any] = {}
    """`reasoning_gym:<dataset>`: that dataset's own settings."""


class RewardConfig(Section):
    """One reward: a built-in by `name`, or your `function`."""

    name: Literal["last_number", "math_answer", "answer_format", "soft_overlong", "regex", "task"] | None = None
    """`last_number`, `math_answer` (math-verify), `answer_format` (guide A's), `soft_overlong` (DAPO's), `regex`,
    or `task` (the task's own scorer)."""
    function: str | None = None
    """`file.py:function` (relative to the YAML) or `package.module:function`, with TRL's signature."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    timeout_s: float = Field(default=5.0, gt=0)
    """Deadline for one completion; the worker process is killed when it passes."""
    pattern: str | None = None
    """`regex`: 1 where it is found in the completion, else 0."""
    buffer_tokens: int | None = Field(default=None, ge=1)
    """`soft_overlong`: length of the ramp before `max_completion_tokens` (default: a fifth of it)."""

    @property
    def label(self) -> str:
        """The name under which scores and metrics appear."""
        return self.name or (self.function or "").rsplit(":", 1)[-1]


class RolloutConfig(Section):
    """How many completions are sampled, how long, and how."""

    engine: Literal["transformers"] = "transformers"
    """What samples completions."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts (groups) in a step."""
    group_size: int = Field(default=8, ge=2)
    """Completions of one prompt."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longer prompts are left out and counted, never cut."""
    max_completion_tokens: int = Field(default=512, ge=1)
    """Length limit of a completion."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; logprobs are taken at this temperature everywhere."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 samples from the whole distribution, which is what the maths assumes."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k most likely tokens; 0 is off."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Stop strings, besides the model's EOS ids; needed for base models that never stop."""


class AlgoConfig(Section):
    """The loss. `docs/papers.md` maps every option to its paper and equation."""

    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo", "reinforce"] = "dapo"
    """Loss by the field's name; fixes ratio, clipping and normalisation."""
    advantage: Annotated[Literal["group", "batch", "none", "leave_one_out"], NullIsNone] = "group"
    """Centred on the group's mean, then divided by the std of the group, of the batch, or by nothing;
    `leave_one_out`: minus the mean of the other completions."""
    combine: Literal["sum", "normalize_each"] = "sum"
    """Several rewards: weighted sum, or each normalised in its group first (GDPO)."""
    ratio: Literal["auto", "token", "sequence"] = "auto"
    """Importance ratio per token or one per sequence. `auto`: sequence for gspo, else token."""
    clip_low: float | Auto = Field(default="auto", union_mode="left_to_right")
    """Ratio is clipped at 1 - clip_low. `auto`: 0.2; sequence ratio (gspo) 3e-4; unused by cispo, sapo, reinforce."""
    clip_high: float | Auto = Field(default="auto", union_mode="left_to_right")
    """Ratio is clipped at 1 + clip_high. `auto`: 0.2; sequence ratio (gspo) 4e-4; cispo: the cap of the ratio
    itself, 5; unused by sapo, reinforce."""
    clip_delta: float | None = None
    """Upper bound of the ratio where the clip does not act (negative advantage); off by default."""
    sapo_tau_pos: float = Field(default=1.0, gt=0)
    """`sapo`: temperature of the soft gate where the advantage is positive."""
    sapo_tau_neg: float = Field(default=1.05, gt=0)
    """`sapo`: temperature of the soft gate elsewhere."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the reference; 0 loads no reference."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    iterations_per_batch: int = Field(default=1, ge=1)
    """Optimizer updates on one batch of rollouts (mu); above 1 the ratio starts to matter."""
    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss."""
    denominator: Literal["all", "with_signal"] = "all"
    """Whether rows of groups without signal count in the loss's denominator."""


class OptimConfig(Section):
    """The optimizer and its schedule."""

    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate. Full fine-tuning usually wants 1e-6 to 2e-5."""
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or falling to `min_lr_frac` at the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises linearly."""
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """Rate at the last step as a fraction of `lr`."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the gradient's norm; null: no clipping."""
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """Which of torch's AdamW kernels. `auto`: fused, on every device."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How an update of weights without a float32 master (`model.master_dtype: none`) is rounded. `stochastic`: up or
    down by chance, right on average, so that small updates are not lost."""


class MemoryConfig(Section):
    """How the step is squeezed into memory. No field changes the gradient (beyond rounding)."""

    micro_batch_tokens: Units = "auto"
    """Padded tokens in one forward and backward; a longer single row still goes alone. `none`: all at once."""
    generation_chunk: Units = "auto"
    """Completions sampled at once. `none`: the whole step."""
    checkpointing: Annotated[Literal["auto", "none", "selective", "full", "offload"], NullIsNone] = "auto"
    """What backward recomputes, always from inputs. `selective`: norms, MLPs and eager attention; fused attention is
    kept. `full`: whole blocks. `offload`: as `full`, with the blocks' inputs in host memory."""
    logprob_chunk_tokens: Units = "auto"
    """Completion tokens whose logits exist at once, forward and backward. `none`: all."""
    packing: Annotated[Literal["auto", "none"], NullIsNone] = "auto"
    """`auto`: a group shares one row, so that its prompt passes through the network once; where an architecture
    cannot, rows are plain. `none`: every completion in a row of its own."""
    mlp_tile_tokens: Units = "auto"
    """Tokens that pass through an MLP at once, each tile recomputed in backward. `none`: all."""


class RunConfig(Section):
    """Length, seed, records."""

    steps: int = Field(default=100, ge=1)
    """Batches of rollouts to train on."""
    seed: int = Field(default=1, ge=0, lt=2**63)
    """Seeds every draw: prompt order, sampling."""
    eval_every: int = Field(default=25, ge=0)
    """Evaluate every N steps, besides start and end; 0: only those two."""
    eval_pass_k: int = Field(default=0, ge=0)
    """Besides greedy accuracy, pass@k from k sampled completions of each held-out prompt; 0: off."""
    checkpoint_every: int = Field(default=25, ge=0)
    """Checkpoint every N steps, besides the last; 0: only the last."""
    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    keep_best: bool = False
    """Keep the weights of the best evaluation in `best/` (weights only)."""
    trackers: list[Literal["tensorboard", "wandb"]] = []
    """Besides the JSONL records, which are always written."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", examples=["auto", "cpu", "cuda", "cuda:0"])
    """`auto`: the GPU where torch sees one, else the CPU."""
    threads: Annotated[int, Field(ge=1)] | Auto = "auto"
    """CPU threads of torch; resuming keeps the number, since it decides how sums round."""
    compile: Annotated[Literal["auto", "none", "layers"], NullIsNone] = "auto"
    """`layers`: torch.compile for the decoder layers in training, which changes gradients by rounding only. `auto`:
    where steps are large enough for it to pay soon (on a CPU, with a C++ compiler); else none."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (on CUDA slower; the CPU is always deterministic)."""
    max_reward_error_frac: float = Field(default=0.1, ge=0, le=1)
    """Stop when more than this share of a step's completions has a failing reward function."""
    max_nonfinite_steps: int = Field(default=3, ge=1)
    """Stop after this many steps in a row whose loss or gradient is not finite."""


class Config(Section):
    """A run. Sections in the order of the data flow."""

    model: ModelConfig
    adapter: Annotated[Literal["none"], NullIsNone] = "none"
    """`none`: every weight is trained."""
    quantization: Annotated[Literal["none"], NullIsNone] = "none"
    """`none`: weights are kept in `model.dtype`."""
    task: TaskConfig
    rewards: list[RewardConfig] = Field(min_length=1)
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    optim: OptimConfig = OptimConfig()
    memory: MemoryConfig = Field(default=MemoryConfig(), examples=["auto", "none", "a mapping of keys"])
    """`auto`, `none` (every lever off), or the fields below."""
    run: RunConfig = RunConfig()
