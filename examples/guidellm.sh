#!/bin/sh
# Loads a server with guidellm (pip install guidellm): 40 requests of 100 prompt tokens and 30 output tokens, 4 in flight.
# Usage: examples/guidellm.sh URL MODEL TOKENIZER, with a URL that ends in /v1 and the directory or name of a tokenizer.
set -eu
guidellm run --disable-progress --backend "kind=openai_http,target=${1%/v1},model=$2" \
    --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=40 \
    --tokenizer "kind=hf_auto,model=$3" --data kind=synthetic_text,prompt_tokens=100,output_tokens=30
