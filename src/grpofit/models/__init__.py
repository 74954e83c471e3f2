"""Models: loading a policy and its tokenizer, the language-model head, saving in the Hugging Face format."""
