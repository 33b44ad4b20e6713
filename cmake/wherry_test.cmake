# wherry_test(name LABELS label... SOURCES file... [NEEDS option...] [TIMEOUT seconds])
#
#   Builds build/tests/<name> from the sources with GoogleTest and GoogleMock (with their main) and
#   registers every TEST in it with ctest, each run in a process of its own: a fork in one never
#   meets the threads of another.
#   LABELS   core (threads as ranks, no library beyond Highway), process (ranks as processes),
#            experts (oneDNN), format (wire formats), slow (over 10 s), soak (only `make test-all`).
#   NEEDS    WHERRY_* options without which it is not built; it is then listed with the reason.
#   TIMEOUT  per TEST, 60 by default; a sanitizer build gets four times as much.
#   Sources may include internal headers ("plan/plan.hpp") and those of tests/.

include(GoogleTest)
set(wherry_not_built "${CMAKE_CURRENT_BINARY_DIR}/not_built.txt")
file(WRITE "${wherry_not_built}" "")

function(wherry_test name)
  cmake_parse_arguments(test "" "TIMEOUT" "LABELS;SOURCES;NEEDS" ${ARGN})
  if(NOT test_LABELS OR NOT test_SOURCES OR test_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "wherry_test(${name} LABELS ... SOURCES ... [NEEDS ...] [TIMEOUT s])")
  endif()
  foreach(label IN LISTS test_LABELS)
    if(NOT label MATCHES "^(core|process|experts|format|slow|soak)$")
      message(FATAL_ERROR "wherry_test(${name}): unknown label '${label}'")
    endif()
  endforeach()
  foreach(option IN LISTS test_NEEDS)
    string(REPLACE "WHERRY_" "WHERRY_HAS_" has "${option}")
    if(NOT ${has})
      get_property(reason GLOBAL PROPERTY wherry_option_${option}_reason)
      file(APPEND "${wherry_not_built}" "${name} (not built): ${reason}\n")
      return()
    endif()
  endforeach()
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 60)
  endif()
  if(WHERRY_SANITIZE)
    math(EXPR test_TIMEOUT "${test_TIMEOUT} * 4")
  endif()

  add_executable(${name} ${test_SOURCES})
  if(WHERRY_SANITIZE)
    target_compile_definitions(${name} PRIVATE WHERRY_SANITIZED="${WHERRY_SANITIZE}")
  endif()
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_link_libraries(${name} PRIVATE wherry_internal nlohmann_json::nlohmann_json GTest::gmock
                                        GTest::gtest GTest::gmock_main)
  set_target_properties(${name} PROPERTIES
                        RUNTIME_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
  # Ranks as processes meet deadlines: such tests do not share few cores with others.
  set(processors 1)
  if("process" IN_LIST test_LABELS)
    set(processors 4)
  elseif("experts" IN_LIST test_LABELS)
    set(processors 2)
  endif()
  gtest_discover_tests(${name}
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT ${test_TIMEOUT} PROCESSORS ${processors})
  # gtest_discover_tests() flattens lists, so a second label would be lost: set them afterwards.
  set(labels_file "${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake")
  file(WRITE "${labels_file}"
       "foreach(test IN LISTS ${name}_TESTS)\n"
       "  set_tests_properties(\"\${test}\" PROPERTIES LABELS \"${test_LABELS}\")\n"
       "endforeach()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${labels_file}")
endfunction()
