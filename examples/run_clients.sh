#!/bin/sh
# Runs each example of a client library against a server, with its packages in an environment of its own: in a shared
# one, the bounds of one library take another one back to a version that is years old.
# Usage: examples/run_clients.sh URL MODEL, with a URL that ends in /v1
set -eu
here=$(cd "$(dirname "$0")" && pwd)
environments=${CLIENTS_DIR:-build/clients}
url=$1 model=$2
failed=

run() { # EXAMPLE COMMAND...
    example=$1
    shift
    echo "$example:"
    "$@" "$url" "$model" 'the weather in rome' || failed="$failed $example"
}

python_example() { # EXAMPLE PACKAGE...
    example=$1 folder=$environments/$1
    shift
    test -x "$folder/bin/python" || python3 -m venv "$folder"
    "$folder/bin/python" -m pip install -q --disable-pip-version-check --upgrade "$@"
    run "$example" "$folder/bin/python" "$here/$example.py"
}

node_example() { # EXAMPLE PACKAGE...
    example=$1 folder=$environments/$1
    shift
    mkdir -p "$folder"
    npm install --silent --prefix "$folder" "$@"
    cp "$here/$example.mjs" "$folder/" # a module finds its packages beside it
    run "$example" node "$folder/$example.mjs"
}

python_example openai_tools openai
python_example anthropic_tools anthropic
python_example ollama_chat ollama
python_example instructor_weather instructor
python_example pydantic_ai_weather 'pydantic-ai-slim[openai]'
python_example langchain_tools langchain-openai
python_example smolagents_tools 'smolagents[openai]'
python_example agent_folder openai-agents
python_example litellm_tools litellm mcp
python_example llama_index_chat llama-index-llms-openai-like
node_example openai_stream openai
node_example ollama_chat ollama
node_example ai_sdk_tools ai @ai-sdk/openai-compatible zod
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
