// The server as the page needs it.  Whatever fails is an Error whose message is a sentence for a person.

/** Bearer header, if there is a key. */
function access(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  }
}

/** A refusal, told with the server's own words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refusal(response) {
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = `the server answered ${response.status} ${response.statusText}`.trim();
  }
  if (response.status === 401) message = "this server wants an API key: put it under Settings, Access";
  return new Refused(response.status, sentence(message));
}

/** With a capital and a full stop; a field's name stays as it is spelt. */
function sentence(text) {
  const trimmed = text.trim();
  const begin = /^\w*[_=[]/.test(trimmed) ? trimmed : trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(begin) ? begin : `${begin}.`;
}

/** The texts of a stream of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ")) yield frame.slice("data: ".length);
    }
  }
}

/** One chat answer as it comes: { text, reason, seed, usage }, each where it is told.
 *  `body` is the request as JSON text. */
export async function* streamChat(body, key, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...access(key) },
    body,
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const part = JSON.parse(data);
    if (part.error) throw new Error(sentence(part.error.message));
    const choice = part.choices[0];
    yield {
      text: choice?.delta?.content ?? "",
      reason: choice?.finish_reason ?? null,
      seed: /"seed":(-?\d+)/.exec(data)?.[1] ?? null, // 64 bits: more than a number here can hold
      usage: part.usage ?? null,
    };
  }
  throw new Error("The connection ended before the answer did.");
}

/** { name, context } of the model. */
export async function fetchModel(key) {
  const response = await ask("v1/models", { headers: access(key) });
  if (!response.ok) throw await refusal(response);
  const card = (await response.json()).data[0];
  return { name: card.id, context: card.max_model_len };
}

/** The text of /metrics. */
export async function fetchMetrics(key) {
  const response = await ask("metrics", { headers: access(key), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.text();
}
