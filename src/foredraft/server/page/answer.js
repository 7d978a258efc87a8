// One answer on the page: its tokens, marked by origin, and a line on how they came.
// Model output only ever becomes text, never markup.

const ORIGINS = {
  accepted: "accepted draft",
  recovered: "recovered",
  bonus: "bonus",
  plain: "plain",
};

export function messageElement(role, name) {
  const element = document.createElement("article");
  element.className = role;
  const heading = document.createElement("h3");
  heading.textContent = name;
  element.append(heading);
  return element;
}

export class Answer {
  #waiting = [];
  #frame = 0;
  #shown = "";
  #content = "";
  #chunks = 0;
  #first = 0;
  #last = 0;

  // `onGrow` is called after tokens were put on the page.
  constructor(onGrow) {
    this.onGrow = onGrow;
    this.element = messageElement("assistant", "Answer");
    this.text = document.createElement("p");
    this.text.className = "text";
    this.note = document.createElement("p");
    this.note.className = "note muted";
    this.element.append(this.text, this.note);
    // Read out as a whole when it is complete, not token by token.
    this.element.setAttribute("aria-busy", "true");
    this.own = {};
    this.usage = null;
    this.reason = null;
  }

  get content() {
    return this.#content;
  }

  take(chunk) {
    const choice = chunk.choices[0];
    const own = chunk.foredraft || {};
    this.#content += choice?.delta?.content ?? "";
    this.reason = choice?.finish_reason ?? this.reason;
    this.usage = chunk.usage ?? this.usage;
    for (const name of ["seed", "statistics"]) {
      if (own[name] !== undefined) this.own[name] = own[name];
    }
    if (!own.tokens?.length) return;
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.#chunks += 1;
    for (const token of own.tokens) this.#waiting.push({ ...token, drafter: own.drafter });
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  // `ending`: why it ended early, in words, or "".
  finish(ending) {
    cancelAnimationFrame(this.#frame);
    this.#flush();
    // What no token had completed: the rest of a character that was cut off.
    if (this.#content.length > this.#shown.length && this.#content.startsWith(this.#shown)) {
      this.text.lastElementChild?.append(this.#content.slice(this.#shown.length));
    }
    this.note.textContent = [ending, ...this.#facts()].filter(Boolean).join(" · ");
    this.element.removeAttribute("aria-busy");
    this.onGrow();
  }

  #flush() {
    this.#frame = 0;
    const spans = this.#waiting.map((token) => {
      const span = document.createElement("span");
      const origin = token.origin in ORIGINS ? token.origin : "plain";
      span.className = `token ${origin}`;
      span.dataset.origin = origin;
      span.title = ORIGINS[origin] + (origin !== "plain" && token.drafter !== "none" ? `, drafter ${token.drafter}` : "");
      span.textContent = token.text;
      this.#shown += token.text;
      return span;
    });
    this.#waiting = [];
    this.text.append(...spans);
    if (spans.length) this.onGrow();
  }

  #facts() {
    const { seed, statistics } = this.own;
    const facts = this.reason === "length" ? ["cut at the most tokens"] : [];
    if (this.usage) {
      const num = this.usage.completion_tokens;
      facts.push(`${num} ${num === 1 ? "token" : "tokens"}`);
      const seconds = (this.#last - this.#first) / 1000;
      if (this.#chunks > 1 && seconds > 0) facts.push(`${(num / seconds).toFixed(1)} tokens/s`);
    }
    if (statistics) {
      facts.push(`${statistics.speedup_estimate.toFixed(2)} × plain, estimated`);
      facts.push(`${statistics.acceptance_length.toFixed(2)} tokens per pass`);
      if (statistics.drafted_tokens) {
        const percent = Math.round(100 * statistics.acceptance_rate);
        facts.push(`${percent} % of ${statistics.drafted_tokens} drafted tokens accepted`);
      }
    }
    if (seed !== undefined) facts.push(`seed ${seed}`);
    return facts;
  }
}
