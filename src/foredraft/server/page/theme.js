// The chosen theme, set before the first paint; app.js has the button that changes it.
"use strict";
try {
  const theme = localStorage.getItem("foredraft-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the system's theme then stands.
}
