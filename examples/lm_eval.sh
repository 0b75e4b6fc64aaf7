#!/bin/sh
# Evaluates a served model with lm-eval (pip install 'lm-eval[api]'), on a small task that this file writes.
# Usage: examples/lm_eval.sh URL MODEL TOKENIZER, with a URL that ends in /v1 and the directory or name of a tokenizer.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for word in red green blue seven; do
    echo "{\"question\": \"$word\", \"answer\": \"$(echo "$word" | tr '[:lower:]' '[:upper:]')\"}"
done >"$folder/words.jsonl"
cat >"$folder/upper_case.yaml" <<TASK
task: upper_case
dataset_path: json
dataset_kwargs: {data_files: {test: $folder/words.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "Write in upper case: {{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
TASK
lm_eval run --model local-completions --tasks upper_case --include_path "$folder" \
    --model_args "model=$2,base_url=$1/completions,tokenizer=$3,num_concurrent=4,max_length=2048"
