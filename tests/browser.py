"""Pages in a real browser, where one is installed."""

import shutil

import pytest

OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium without a window."""
    webdriver = pytest.importorskip("selenium.webdriver")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("neither Chromium nor Chrome is installed with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    logs = {"browser": "ALL", "performance": "ALL"}
    options.set_capability("goog:loggingPrefs", logs)
    service = webdriver.ChromeService(driver)
    found = webdriver.Chrome(options, service)
    yield found
    found.quit()


def resize(browser, width):
    """Give the page a width. Real windows have a minimum width; emulated ones do not."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def open_page(browser, file, width):
    """Show a file in a window of this width, and check that it fits."""
    resize(browser, width)
    browser.get(file.as_uri())
    assert browser.execute_script("return innerWidth") == width
    assert_fits_without_errors(browser)


def assert_fits_without_errors(browser):
    """Nothing is beyond the right edge, and nothing is in the console."""
    assert browser.execute_script(f"return {OVERFLOW}") <= 0
    assert browser.get_log("browser") == []
