#!/bin/sh
# Installs the packages of the examples into environments of their own, and runs each against a server.
# Usage: examples/run_clients.sh URL MODEL, with a URL that ends in /v1
set -eu
here=$(cd "$(dirname "$0")" && pwd)
environment=${CLIENTS_VENV:-build/clients-venv}
modules=${CLIENTS_NPM:-build/clients-npm}
python3 -m venv "$environment"
"$environment/bin/pip" install -q openai anthropic instructor 'pydantic-ai-slim[openai]' langchain-openai 'smolagents[openai]' \
    litellm mcp llama-index-llms-openai-like
for example in openai_tools anthropic_tools instructor_weather pydantic_ai_weather langchain_tools smolagents_tools \
    litellm_tools llama_index_chat; do
    echo "$example:"
    "$environment/bin/python" "$here/$example.py" "$1" "$2" 'the weather in rome'
done
mkdir -p "$modules"
npm install --silent --prefix "$modules" openai ai @ai-sdk/openai-compatible zod
for example in openai_stream ai_sdk_tools; do
    echo "$example:"
    cp "$here/$example.mjs" "$modules/" # a module finds its packages beside it
    node "$modules/$example.mjs" "$1" "$2" 'the weather in rome'
done
