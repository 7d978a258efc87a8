// The page: a conversation, its settings, and what becomes of a message.

import { Answer, messageElement } from "./answer.js";
import { Api, ApiError } from "./api.js";
import { Figures } from "./figures.js";

const BUSY_MS = 500;
const IDLE_MS = 2000;
const THEMES = ["auto", "light", "dark"];
const NEAR_THE_END = 48;

const byId = (id) => document.getElementById(id);
const log = byId("log");
const message = byId("message");

const api = new Api();
const figures = new Figures();
let conversation = [];
let running = null;
let isFollowing = true;
let defaults = null;
let isBusy = false;
let timer = 0;

// ------------------------------------------------------------------------------------------------ messages

function showProblem(text) {
  const problem = byId("problem");
  problem.textContent = text;
  problem.hidden = !text;
}

function setRunning(controller) {
  running = controller;
  // The focus must not stay on a button that goes away.
  const hadFocus = document.activeElement === byId("stop") || document.activeElement === byId("send");
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  if (hadFocus) (controller ? byId("stop") : message).focus();
  if (controller) byId("status").textContent = "The answer is coming.";
}

function followTheEnd() {
  if (isFollowing) log.scrollTop = log.scrollHeight;
}

function questionElement(content) {
  const question = messageElement("user", "You");
  const text = document.createElement("p");
  text.className = "text";
  text.textContent = content;
  question.append(text);
  return question;
}

async function send() {
  const content = message.value;
  if (running || !content.trim()) return;
  const settings = readSettings();
  if (!settings) return;
  showProblem("");
  byId("empty").hidden = true;
  message.value = "";
  isFollowing = true;
  const question = questionElement(content);
  const answer = new Answer(followTheEnd);
  log.append(question, answer.element);
  followTheEnd();
  const controller = new AbortController();
  setRunning(controller);
  const messages = [...conversation, { role: "user", content }];
  const ending = await receive({ messages, ...settings }, controller, answer);
  if (running !== controller) return; // a new chat was begun meanwhile
  setRunning(null);
  if (ending && !answer.content) {
    // Nothing came of it: take it back, so that it can be sent again.
    question.remove();
    answer.element.remove();
    message.value ||= content;
    byId("status").textContent = "";
  } else {
    answer.finish(ending);
    conversation = [...messages, { role: "assistant", content: answer.content }];
    byId("status").textContent = ending ? `The answer was ${ending}.` : "The answer is complete.";
  }
}

// Why the answer ended early, in words, or "".
async function receive(fields, controller, answer) {
  const body = { ...fields, stream: true, stream_options: { include_usage: true, include_speculation: true } };
  poll();
  try {
    for await (const chunk of api.chat(body, controller.signal)) answer.take(chunk);
    return "";
  } catch (error) {
    if (controller.signal.aborted) return "stopped";
    if (!(error instanceof ApiError)) throw error;
    showProblem(error.message);
    if (error.status === 401) askForKey();
    return "broken off";
  }
}

function stop() {
  running?.abort();
}

function startAnew() {
  stop();
  setRunning(null);
  conversation = [];
  for (const element of log.querySelectorAll("article")) element.remove();
  byId("empty").hidden = false;
  byId("status").textContent = "New chat.";
  showProblem("");
  message.focus();
}

// ------------------------------------------------------------------------------------------------ settings

// Fields of a request, or null when one is wrong; what is left at the server's default is not sent.
function readSettings() {
  for (const input of byId("settings").elements) {
    if (!input.checkValidity()) {
      showProblem(`${input.labels[0].textContent}: ${input.validationMessage}`);
      openPanel(true);
      input.focus();
      return null;
    }
  }
  const fields = {};
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"], ["seed", "seed"]]) {
    if (byId(id).value) fields[name] = byId(id).valueAsNumber;
  }
  const speculative = {};
  if (byId("method").value) speculative.method = byId("method").value;
  if (byId("k").value) speculative.num_speculative_tokens = byId("k").valueAsNumber;
  if (defaults && byId("adaptive").checked !== defaults.adaptive) speculative.adaptive = byId("adaptive").checked;
  if (Object.keys(speculative).length) fields.speculative = speculative;
  return fields;
}

function showDefaults(state) {
  defaults = state.default;
  const [first] = byId("method").options;
  first.textContent = `default: ${defaults.method}`;
  byId("method").replaceChildren(first, ...state.methods.map((name) => new Option(name === "none" ? "none (plain)" : name, name)));
  byId("k").placeholder = defaults.num_speculative_tokens;
  byId("adaptive").checked = defaults.adaptive;
}

function openPanel(isOpen) {
  document.body.classList.toggle("panel-open", isOpen);
  byId("panel-toggle").setAttribute("aria-expanded", isOpen);
}

// ------------------------------------------------------------------------------------------------ the key and the figures

function askForKey() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

async function useKey() {
  api.setKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  showProblem("");
  message.focus();
  await poll();
}

async function poll() {
  clearTimeout(timer);
  if (!document.hidden) await refresh();
  clearTimeout(timer);
  // While a key is missing there is nothing to ask for.
  if (byId("key-form").hidden) timer = setTimeout(poll, isBusy || running ? BUSY_MS : IDLE_MS);
}

async function refresh() {
  try {
    const state = await api.state();
    isBusy = state.running + state.waiting > 0 || state.tokens_per_second > 0;
    if (!defaults) showDefaults(state);
    figures.show(state);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    isBusy = false;
    figures.unreachable(error.message);
    if (error.status === 401) {
      showProblem(error.message);
      askForKey();
    }
  }
}

// ------------------------------------------------------------------------------------------------ theme

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "auto";
  const theme = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  showTheme(theme);
  try {
    localStorage.setItem("foredraft-theme", theme);
  } catch {
    // The choice then lasts as long as the page.
  }
}

// ------------------------------------------------------------------------------------------------ events

function on(id, event, action) {
  byId(id).addEventListener(event, (happened) => {
    if (event === "submit") happened.preventDefault();
    action(happened);
  });
}

on("composer", "submit", send);
on("settings", "submit", send);
on("key-form", "submit", useKey);
on("stop", "click", stop);
on("new", "click", startAnew);
on("theme", "click", nextTheme);
on("panel-toggle", "click", () => openPanel(!document.body.classList.contains("panel-open")));
on("message", "keydown", (event) => {
  // Enter also ends the choice of a character in some input methods.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
on("log", "scroll", () => {
  isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END;
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) stop();
});
document.addEventListener("visibilitychange", poll);

showTheme(document.documentElement.dataset.theme ?? "auto");
if (matchMedia("(pointer: fine)").matches) message.focus();
poll();
