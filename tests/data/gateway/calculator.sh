#!/usr/bin/env bash
# The agent of examples/openai_agent.py by curl: ask, multiply if the policy calls its tool, and ask again.
set -euo pipefail
integer='{"type": "integer"}'
schema="{\"type\": \"object\", \"properties\": {\"a\": $integer, \"b\": $integer}, \"required\": [\"a\", \"b\"]}"
tool="{\"type\": \"function\", \"function\": {\"name\": \"multiply\", \"description\": \"Multiply two numbers.\", \"parameters\": $schema}}"
[[ $ASYNCRL_TASK =~ \"prompt\":\ ?(\"[0-9*]*\") ]]
messages="{\"role\": \"user\", \"content\": ${BASH_REMATCH[1]}}"
called='"message": (\{.*"tool_calls": \[\{"id": ("[^"]*").*\}), "logprobs"'
factors='\\"a\\": ([0-9]+), \\"b\\": ([0-9]+)'
while
    reply=$(curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -d "{\"model\": \"policy\", \"messages\": [$messages], \"tools\": [$tool]}")
    [[ $reply =~ $called ]]
do
    said=${BASH_REMATCH[1]} id=${BASH_REMATCH[2]} answer="Error: no two factors"
    [[ ! $said =~ $factors ]] || answer=$((BASH_REMATCH[1] * BASH_REMATCH[2]))
    messages+=", $said, {\"role\": \"tool\", \"tool_call_id\": $id, \"content\": \"$answer\"}"
done
