// Talks to the server: requests with the API key, errors in words, and streams of chunks.
// Knows nothing of the page.

const KEY_NAME = "foredraft-key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export class Api {
  constructor() {
    try {
      this.key = sessionStorage.getItem(KEY_NAME) || "";
    } catch {
      this.key = "";
    }
  }

  setKey(key) {
    this.key = key;
    try {
      sessionStorage.setItem(KEY_NAME, key);
    } catch {
      // Kept until the page is left.
    }
  }

  async state() {
    const response = await this.#send("/v1/speculation", { signal: AbortSignal.timeout(5000), cache: "no-store" });
    return response.json();
  }

  // Yields chunks of a streamed answer.  Ends normally only if the server said that the answer is complete.
  async *chat(body, signal) {
    const response = await this.#send("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(sentence(chunk.error.message));
      yield chunk;
    }
    throw new ApiError("The connection ended before the answer did. Send the message again.");
  }

  async #send(path, options) {
    const headers = { ...options.headers, ...(this.key ? { Authorization: `Bearer ${this.key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached. Check that it still runs, then try again.");
    }
    if (!response.ok) throw new ApiError(await explanation(response, Boolean(this.key)), response.status);
    return response;
  }
}

async function explanation(response, hadKey) {
  if (response.status === 401) return hadKey ? "This API key is not accepted." : "This server asks for an API key.";
  let message = "";
  try {
    message = sentence((await response.json()).error.message);
  } catch {
    // Something between here and the server answered.
  }
  return message || `The server answered with status ${response.status}. Try again.`;
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (buffer + value).split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) yield event.slice(6);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete. Send the message again.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
