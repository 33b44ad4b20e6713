# cmake -DSOURCE_DIR=... -DOUTPUT=... -P git_commit.cmake
# Writes a source that knows the commit: "1a2b3c4d5e6f", with "-dirty" where tracked files differ
# from it, "unknown" outside a checkout. An unchanged answer leaves the file and its date alone.

set(commit unknown)
find_program(GIT git)
if(GIT)
  execute_process(COMMAND "${GIT}" -C "${SOURCE_DIR}" rev-parse --short=12 HEAD
                  OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
                  RESULT_VARIABLE result)
  if(result EQUAL 0)
    set(commit "${head}")
    execute_process(COMMAND "${GIT}" -C "${SOURCE_DIR}" status --porcelain --untracked-files=no
                    OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      string(APPEND commit "-dirty")
    endif()
  endif()
endif()

set(text "#include \"support/build_info.hpp\"

std::string_view wherry::build_info::git_commit() { return \"${commit}\"; }
")
set(old "")
if(EXISTS "${OUTPUT}")
  file(READ "${OUTPUT}" old)
endif()
if(NOT text STREQUAL old)
  file(WRITE "${OUTPUT}" "${text}")
endif()
